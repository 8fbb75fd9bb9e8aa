//! The faults of a plan, as they happen to a world.

use super::{CHECK, World};
use crate::ambush::{About, Sprung};
use crate::checks;
use crate::drains;
use crate::load::number_of;
use crate::master::Master;
use crate::net::NodePort;
use crate::plan::{Fault, Process, TENANT_KEYS, Trick, tenant_name};
use crate::ssd::Ssd;
use kvpool_disk::medium::MediumRefused;
use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::{Pool, TaskRefused, TaskView};
use kvpool_types::{Incarnation, NodeName};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

/// How long a node that is drained waits for its blocks to be moved.
const DRAINING: Duration = Duration::from_secs(4);
/// The same where nothing else takes blocks: slow messages are no reason to leave with some.
const QUIET_DRAINING: Duration = Duration::from_secs(20);
/// How long an operator waits for a drain. A move without a target is given up after five seconds.
const OUT_OF_SERVICE: Duration = Duration::from_secs(7);
/// How long a drained node goes on.
const STANDS_DRAINED: Duration = Duration::from_millis(1_500);
/// How long a lease is waited for, and how often it is looked for.
const WATCH: Duration = Duration::from_secs(3);
const MOMENT: Duration = Duration::from_millis(3);
/// How long the requests of a dead process go on. A process starts later again.
const DEATH: Duration = Duration::from_millis(1);
/// How long a process that leaves takes to say goodbye.
const GOODBYE: Duration = Duration::from_millis(300);

/// How many wrong replicas and copies a master has found.
fn wrong_found_by(master: &Master) -> u64 {
    let counters = master.seat.metrics.snapshot();
    counters.get("replicas_corrupt_total").copied().unwrap_or(0)
}

impl World {
    /// Lets a fault of the plan happen.
    pub(super) fn inflict(self: &Arc<Self>, fault: Fault) {
        let ms = Duration::from_millis;
        match fault {
            Fault::Crash(process, down) => self.crash(process, ms(down)),
            Fault::PowerCut(number, down) => {
                self.crash(Process::Node(number), ms(down));
                self.after_death(number, Ssd::cut_power);
            }
            Fault::RolledBack(number, down) => {
                self.crash(Process::Node(number), ms(down));
                self.after_death(number, Ssd::roll_back);
            }
            Fault::Cloned(from, to, down) => {
                let disks = self.ssds.get(from).zip(self.ssds.get(to));
                if let Some((source, copy)) = disks.filter(|_| from != to) {
                    self.crash(Process::Node(to), ms(down));
                    let source = Arc::clone(source);
                    // Before the node can open it again.
                    copy.twins(&source);
                    self.after_death(to, move |copy| copy.become_copy_of(&source));
                }
            }
            Fault::NewDisk(number, down) => {
                self.crash(Process::Node(number), ms(down));
                self.after_death(number, Ssd::become_blank);
            }
            Fault::Detach(number) => {
                spawn_local(Arc::clone(self).detach_disks(number));
            }
            Fault::Disk(number, fault, wait) => {
                if let Some(ssd) = self.ssds.get(number) {
                    ssd.inflict(fault, ms(wait));
                }
            }
            Fault::Leave(number, down) => {
                self.node_is_lost();
                if let Some(port) = self.net.node(number) {
                    spawn_local(Arc::clone(self).leave(port, number, ms(down)));
                }
            }
            Fault::Drain(number, down) => {
                if let Some(port) = self.net.node(number) {
                    spawn_local(Arc::clone(self).drain(port, number, ms(down)));
                }
            }
            Fault::OutOfService(number, force, down) => {
                if let Some(port) = self.net.node(number) {
                    let taken = Arc::clone(self).take_out_of_service(port, number, force, ms(down));
                    spawn_local(taken);
                }
            }
            Fault::Retire(number, down) => {
                let master = self.masters.lock().get(&number).cloned();
                if let Some(master) = master {
                    spawn_local(Arc::clone(self).retire(master, ms(down)));
                }
            }
            Fault::LeaderDies(down) => {
                spawn_local(Arc::clone(self).kill_after_a_promise(ms(down)));
            }
            Fault::Stop(process, wait) => {
                self.net.stop(process, ms(wait));
                if let Process::Master(master) = process {
                    self.disk.stall(master, ms(wait));
                }
            }
            Fault::Cut(from, to, wait) => self.net.cut(from, to, ms(wait)),
            Fault::StoreStalls(master, wait) => self.disk.stall(master, ms(wait)),
            Fault::StoreUnknown(master, wait) => self.disk.forget_outcomes(master, ms(wait)),
            Fault::StoreFull(wait) => self.disk.fill(ms(wait)),
            Fault::LittleMemory(number, percent, down) => {
                self.memory.lock().insert(number, percent);
                self.crash(Process::Node(number), ms(down));
            }
            Fault::Intruder(node) => {
                spawn_local(Arc::clone(self).intrude(node));
            }
            Fault::Quota(tenant, hard) => {
                spawn_local(Arc::clone(self).change_quota(tenant, hard));
            }
            Fault::Delete(tenant, away) => {
                spawn_local(Arc::clone(self).delete_tenant(tenant, ms(away)));
            }
            Fault::ClockJumps(master, by) => {
                if let Some(clock) = self.clocks.get(master) {
                    clock.jump(by);
                    self.net.promises.clock_jumps();
                }
            }
        }
    }

    /// Lets happen what lies in wait, each when its moment is there.
    pub(super) async fn spring_ambushes(self: Arc<Self>) {
        let Some(mut due) = self.net.ambushes.due() else {
            return;
        };
        while let Some(sprung) = due.recv().await {
            let world = Arc::clone(&self);
            // The block may be gone when the call is made.
            let key = match sprung.ambush.trick {
                Trick::Touch(_) => self.key_of(&sprung.about),
                Trick::Fault(_) | Trick::Late(_) => None,
            };
            spawn_local(async move {
                sleep(Duration::from_micros(sprung.ambush.after)).await;
                if !world.has_healed.load(Ordering::Acquire) {
                    world.spring(&sprung, key);
                }
            });
        }
    }

    /// `key` is the namespace and the number of the key that a call is for.
    fn spring(self: &Arc<Self>, sprung: &Sprung, key: Option<(usize, u64)>) {
        match sprung.ambush.trick {
            Trick::Fault(fault) => {
                let at = sprung.ambush.at;
                self.trace.note("----", format_args!("at {at:?}: {fault}"));
                self.inflict(fault);
            }
            Trick::Touch(call) => {
                let is_of = |client: &usize| {
                    key.is_none_or(|(tenant, _)| self.plan.tenant_of(*client) == tenant)
                };
                let touchers = self.touchers.lock();
                let mut of_key = touchers.iter().filter(|(client, _)| is_of(client));
                if let Some((_, toucher)) = of_key.next() {
                    // The client may have died.
                    let _dead = toucher.send((key.map(|(_, key)| key), call));
                }
            }
            Trick::Late(_) => {}
        }
    }

    /// The namespace and the number of the key that a message is about.
    fn key_of(&self, about: &About) -> Option<(usize, u64)> {
        let leading = checks::leading(self);
        let (_, pool) = leading.first()?;
        let of_block = |block: StoredBlock| (block.namespace, block.key);
        let (namespace, key) = match about {
            About::Key(namespace, key) => (*namespace, key.clone()),
            About::KeyOf(client, key) => {
                let tenant = self.plan.tenant_of(*client);
                (pool.namespace(&tenant_name(tenant)).ok()?, key.clone())
            }
            About::Version(version) => {
                let blocks = pool.stored_blocks().into_iter();
                let mut all = blocks.chain(pool.stored_copies());
                of_block(all.find(|block| block.version.0 == *version)?)
            }
            About::Nothing => return None,
        };
        let mut tenants = 0..self.plan.tenants.len();
        let tenant =
            tenants.find(|tenant| pool.namespace(&tenant_name(*tenant)) == Ok(namespace))?;
        let number = number_of(&key)?;
        Some((tenant, tenant as u64 * TENANT_KEYS + number))
    }

    /// An operator has the leader forget the disks that a node had, as `kvctl ssd detach` does.
    async fn detach_disks(self: Arc<Self>, number: usize) {
        let Some((_, pool)) = checks::leading(&self).into_iter().next() else {
            return;
        };
        let name = format!("n{number}");
        let media = pool.media().into_iter().map(|view| view.record);
        for medium in media.filter(|medium| medium.node.0 == name) {
            // Copies leave without their nodes.
            self.node_is_lost();
            self.ssds.get(number).into_iter().for_each(|ssd| ssd.harm());
            let leases = &self.net.promises.leases;
            leases.disk_goes();
            let detached = pool.detach_medium(medium.medium, true).await;
            leases.disk_has_gone();
            let said = format_args!("detach of {}: {detached:?}", medium.id).to_string();
            self.trace.note(Process::Node(number), said);
        }
    }

    /// Changes a disk once the requests of its dead node are done in part.
    fn after_death(&self, node: usize, change: impl FnOnce(&Ssd) + 'static) {
        if let Some(ssd) = self.ssds.get(node).cloned() {
            spawn_local(async move {
                sleep(DEATH).await;
                change(&ssd);
            });
        }
    }

    /// Waits for a lease, and kills who gave it. What that master has not logged yet is lost.
    async fn kill_after_a_promise(self: Arc<Self>, down: Duration) {
        let until = Instant::now() + WATCH;
        while Instant::now() < until && !self.has_healed.load(Ordering::Acquire) {
            if self.net.promises.is_fresh()
                && let Some((leader, _)) = checks::leading(&self).first()
            {
                self.crash(Process::Master(*leader), down);
                return;
            }
            sleep(MOMENT).await;
        }
    }

    /// A life of a master steps down and ends.
    async fn retire(self: Arc<Self>, master: Arc<Master>, down: Duration) {
        master.retire();
        sleep(GOODBYE).await;
        if !master.life.is_over() && self.end_master(master.number) {
            self.start_again(Process::Master(master.number), down);
        }
    }

    /// A life of a node says goodbye and ends. What it takes along has its caller counted.
    pub(super) async fn leave(self: Arc<Self>, port: NodePort, number: usize, down: Duration) {
        port.node.leave();
        sleep(GOODBYE).await;
        if !port.life.is_over() {
            port.node.detach();
            self.end_node(number);
            self.start_again(Process::Node(number), down);
        }
    }

    /// Orders the drain of a node. The order may wait for the session of the node, so the drain may begin later, or be
    /// refused. It is judged when it begins.
    async fn order_drain(
        self: Arc<Self>,
        pool: Arc<Pool>,
        number: usize,
        node: Incarnation,
        force: bool,
    ) -> Result<TaskView, TaskRefused> {
        let name = NodeName(format!("n{number}"));
        let (of, named) = (Arc::clone(&pool), name.clone());
        let mut order = Box::pin(async move { of.drain_node(&named, force).await });
        // The node may have begun another life while the order waited.
        let is_draining = || {
            let members = pool.members.all();
            members.iter().any(|one| one.name == name && one.drains())
        };
        // Only a node that was the last one all the while must be refused for sure.
        let (mut is_last, mut begins) = (!force, false);
        let answered = poll_fn(|context| {
            is_last = is_last && drains::is_last(&pool, node);
            let answer = order.as_mut().poll(context);
            if !begins && (is_draining() || matches!(answer, Poll::Ready(Ok(_)))) {
                begins = true;
                let ssd = self.ssds.get(number).into_iter();
                ssd.for_each(|ssd| ssd.ledger.drain());
            }
            if is_last && drains::drains(&pool, node) {
                is_last = false;
                let wrong = format!(
                    "n{number} is taken out of service without force, and no other node takes its blocks"
                );
                self.load.violate(wrong);
            }
            answer
        });
        answered.await
    }

    /// An operator takes a node out of service. It stops a while after the leader calls it drained, or when that takes
    /// too long.
    async fn take_out_of_service(
        self: Arc<Self>,
        port: NodePort,
        number: usize,
        force: bool,
        down: Duration,
    ) {
        let Some((_, pool)) = checks::leading(&self).into_iter().next() else {
            return;
        };
        let node = port.node.incarnation();
        let mut order = Box::pin(Arc::clone(&self).order_drain(pool, number, node, force));
        let answer = poll_fn(|context| Poll::Ready(order.as_mut().poll(context))).await;
        match answer {
            Poll::Ready(Err(refused)) => {
                let said = format_args!("is not taken out of service: {refused}").to_string();
                self.trace.note(Process::Node(number), said);
                return;
            }
            Poll::Ready(Ok(_)) => {}
            Poll::Pending => {
                // The order goes on when the operator leaves.
                spawn_local(order);
            }
        }
        let goes_on = || !port.life.is_over() && !self.has_healed.load(Ordering::Acquire);
        // Some nodes stop before the leader has answered the order.
        let until = match down.as_millis() % 3 {
            0 => Instant::now(),
            _ => Instant::now() + OUT_OF_SERVICE,
        };
        while Instant::now() < until && goes_on() && !drains::is_called_drained(&self, node) {
            sleep(CHECK).await;
        }
        let until = Instant::now() + STANDS_DRAINED;
        while Instant::now() < until && goes_on() && drains::is_called_drained(&self, node) {
            sleep(CHECK).await;
        }
        if !port.life.is_over() {
            self.drain(port, number, down).await;
        }
    }

    /// As a node at SIGTERM: it leaves once the master says that no block waits to be moved, or after a while.
    async fn drain(self: Arc<Self>, port: NodePort, number: usize, down: Duration) {
        let losses = self.losses.load(Ordering::Acquire);
        let found = self.found_wrong();
        let taker = checks::takes_from(&self, port.node.incarnation());
        port.node.drain();
        self.ssds
            .get(number)
            .into_iter()
            .for_each(|ssd| ssd.ledger.drain());
        let is_quiet = self.plan.keeps_all && self.plan.losses().next().is_none();
        let patience = if is_quiet { QUIET_DRAINING } else { DRAINING };
        let saved = Self::word_to(&port, patience).await;
        if port.life.is_over() {
            return;
        }
        self.judge_word(number, &port);
        let left = saved.map_or("an unknown number of".to_owned(), |left| left.to_string());
        let said = format_args!("leaves, {left} blocks have no other replica").to_string();
        self.trace.note(Process::Node(number), said);
        let wrong = match saved {
            Some(0) => {
                self.saved.fetch_add(1, Ordering::Relaxed);
                match losses == self.losses.load(Ordering::Acquire) {
                    true => checks::nothing_left_on(&self, &port, found),
                    false => Ok(()),
                }
            }
            left => {
                self.left_early.store(true, Ordering::Release);
                match left.zip(taker) {
                    Some((left, taker)) => checks::most_have_moved(&self, number, left, &taker),
                    None => Ok(()),
                }
            }
        };
        if let Err(wrong) = wrong {
            self.load.violate(wrong);
        }
        // With a disk, its blocks leave memory and wait there.
        if saved != Some(0) || self.plan.has_disks() {
            self.node_is_lost();
        }
        self.leave(port, number, down).await;
    }

    /// Waits for so long at most, until a node that stops has heard how many blocks leave with it.
    pub(super) async fn word_to(port: &NodePort, patience: Duration) -> Option<u64> {
        let until = Instant::now() + patience;
        loop {
            match port.node.saved() {
                None if Instant::now() < until && !port.life.is_over() => sleep(CHECK).await,
                saved => return saved,
            }
        }
    }

    /// A node that stops takes no word of its leader from before the leader heard of the stop.
    pub(super) fn judge_word(&self, number: usize, port: &NodePort) {
        if port.node.saved().is_some() && !self.net.answers.have_reached(&port.life) {
            self.load.violate(format!(
                "n{number} stops, and takes an answer that its leader gave before it heard of the stop"
            ));
        }
    }

    /// Ends the process of a master. False when it has ended before.
    fn end_master(&self, number: usize) -> bool {
        let master = self.masters.lock().remove(&number);
        let lived = master.is_some();
        if let Some(master) = master {
            if master.seat.metrics.blocks_evicted() > 0 {
                self.has_evicted.store(true, Ordering::Release);
            }
            let found = wrong_found_by(&master);
            self.found_by_dead.fetch_add(found, Ordering::AcqRel);
            master.kill();
        }
        lived
    }

    /// How many wrong replicas and copies masters have found.
    pub(crate) fn found_wrong(&self) -> u64 {
        let masters = self.masters.lock();
        let by_living: u64 = masters.values().map(|master| wrong_found_by(master)).sum();
        self.found_by_dead.load(Ordering::Acquire) + by_living
    }

    /// A node is gone with blocks that may be nowhere else.
    pub(super) fn node_is_lost(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.blocks_leave();
    }

    /// Blocks leave the pool with the node that they were on.
    pub(crate) fn blocks_leave(&self) {
        *self.lost_last.lock() = Some(Instant::now());
    }

    /// Whether a node was lost a moment ago, or was back then with an empty memory. The next look may miss its blocks.
    pub(crate) fn has_just_lost(&self) -> bool {
        const MOMENTS: Duration = Duration::from_millis(500);
        let last = *self.lost_last.lock();
        last.is_some_and(|last| last.elapsed() < MOMENTS)
    }

    /// Ends the process of a node. False when it has ended before.
    fn end_node(&self, number: usize) -> bool {
        let life = self.nodes.lock().remove(&number);
        let lived = life.is_some();
        if let Some(life) = life {
            life.end();
            self.net.close(Process::Node(number));
        }
        lived
    }

    /// A process dies, and starts again after a while. The machine of the only master loses its power.
    pub(crate) fn crash(self: &Arc<Self>, process: Process, down: Duration) {
        match process {
            Process::Master(number) => {
                if !self.end_master(number) {
                    return;
                }
                if self.plan.electing == 0 {
                    self.disk.lose_unflushed();
                }
            }
            Process::Node(number) => {
                if !self.end_node(number) {
                    return;
                }
                self.node_is_lost();
            }
            Process::Client(number) => {
                let Some(life) = self.clients.lock().remove(&number) else {
                    return;
                };
                life.end();
                self.net.promises.forget(process);
            }
        }
        self.start_again(process, down);
    }

    fn start_again(self: &Arc<Self>, process: Process, down: Duration) {
        let world = Arc::clone(self);
        spawn_local(async move {
            let until = Instant::now() + down;
            // What happens to a disk with the death of its node happens before the next life.
            let dead = Instant::now() + 2 * DEATH;
            while Instant::now() < until && !world.has_healed.load(Ordering::Acquire) {
                sleep(CHECK).await;
            }
            sleep_until(dead).await;
            world
                .trace
                .note("----", format_args!("{process} starts again"));
            // A node whose disk fails does not start, and is tried again.
            let is_failing =
                |number: usize| world.ssds.get(number).is_some_and(|ssd| ssd.is_failing());
            let damaged = MediumRefused::Damaged.to_string();
            let started = match process {
                Process::Master(number) => world.start_master(number),
                Process::Node(number) => loop {
                    let refused = match world.start_node(number) {
                        Err(refused) => refused,
                        started => break started,
                    };
                    let ssd = world.ssds.get(number).filter(|ssd| ssd.may_be_damaged());
                    if is_failing(number) {
                        sleep(CHECK).await;
                    } else if let Some(ssd) = ssd.filter(|_| refused.contains(&damaged)) {
                        world
                            .trace
                            .note("----", format_args!("{process} resets its disk: {refused}"));
                        ssd.become_blank();
                    } else {
                        break Err(refused);
                    }
                },
                Process::Client(number) => {
                    world.start_client(number);
                    Ok(())
                }
            };
            if let Err(error) = started {
                world.load.violate(error);
            }
        });
    }
}
