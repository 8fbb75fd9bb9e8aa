//! The load: clients that put, get, replace and remove blocks with the production client.

use crate::dice::Dice;
use crate::history::{History, Outcome, PutNumber, bytes_of};
use crate::life::Life;
use crate::link;
use crate::net::{Net, master_address};
use crate::plan::{Call, Plan, Process, TENANT_KEYS, tenant_name};
use crate::whole::Whole;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use kvpool_client::simulation::{Network, Unanswered};
use kvpool_client::{
    Client, GetBlock, GetOptions, GetOutcome, Key, Length, Namespace, Options, PutBlock, PutError,
    PutOptions, PutOutcome, Region, Remove, RemoveError, ReplicaBlocks, ReplicaChange, ReplicaWish,
    Timeouts, TransportChoice,
};
use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::Pool;
use kvpool_proto as proto;
use kvpool_transport::{Link, TransferError};
use kvpool_types::key::KeyRef;
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, HostId, Incarnation};
use parking_lot::Mutex;
use prost::Message;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// How long operations may take.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long a call by hand may take.
const ASKING: Duration = Duration::from_secs(1);
/// How long leases are held at most before they are renewed or given back, in microseconds.
const HELD: u64 = 1_500_000;
/// In so many of 1000 cases a holder of leases asks whether blocks are there, and not where.
const PRESENCE: u64 = 350;
/// In so many of 1000 cases a call by hand goes to the master that leads. Others refuse it.
const TO_LEADER: u64 = 850;
/// How many calls of ambushes a client makes at once.
const CALLS_AT_ONCE: usize = 4;
/// How much later than its deadline a call may return.
const GRACE: Duration = Duration::from_millis(600);

/// What clients share, and count.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) net: Arc<Net>,
    pub(crate) history: Mutex<History>,
    pub(crate) whole: Mutex<Whole>,
    pub(crate) violations: Mutex<Vec<String>>,
    pub(crate) is_over: AtomicBool,
    pub(crate) running: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) failures: AtomicU64,
}

/// One client's way to all others.
#[derive(Debug)]
struct Wires {
    net: Arc<Net>,
    from: Process,
    life: Life,
}

impl Network for Wires {
    fn call(
        &self,
        address: &str,
        method: &'static str,
        request: Bytes,
    ) -> BoxFuture<'static, Result<Bytes, Unanswered>> {
        let net = Arc::clone(&self.net);
        let (from, life) = (self.from, self.life.clone());
        Box::pin(net.call(from, life, address.to_owned(), method, request))
    }

    fn dial(
        &self,
        address: &str,
        incarnation: Incarnation,
        deadline: std::time::Instant,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
        Box::pin(link::dial(
            Arc::clone(&self.net),
            self.from,
            self.life.clone(),
            address.to_owned(),
            incarnation,
            deadline,
        ))
    }
}

/// The name of a key in its namespace.
pub(crate) fn name(key: u64) -> Key {
    let key = key % TENANT_KEYS;
    let text = if key.is_multiple_of(2) {
        format!("key-{key}")
    } else {
        format!("{:064x}", u128::from(key) << 64 | u128::from(key))
    };
    Key::parse(&text).expect("invariant: a short text is a key")
}

/// The number in its namespace of a key that [`name`] gave.
pub(crate) fn number_of(key: &Key) -> Option<u64> {
    match key.as_ref() {
        KeyRef::Digest { digest, .. } => digest.last_chunk().copied().map(u64::from_be_bytes),
        KeyRef::Text(text) => text.strip_prefix("key-")?.parse().ok(),
    }
}

/// The key before a key in its chain. Chains have one to five blocks.
pub(crate) fn parent_of(key: u64) -> Option<u64> {
    let in_namespace = key % TENANT_KEYS;
    (!matches!(in_namespace % 9, 0 | 1 | 4)).then(|| key - 1)
}

/// Connects a client; it tries until it can.
pub(crate) async fn connect(
    net: &Arc<Net>,
    number: usize,
    life: &Life,
    masters: usize,
    namespace: &str,
) -> Client {
    loop {
        let options = Options {
            masters: (0..masters).map(master_address).collect(),
            namespace: Namespace {
                name: namespace.to_owned(),
                ..Namespace::default()
            },
            transport: TransportChoice::Tcp,
            timeouts: Timeouts {
                connect: TIMEOUT,
                put: TIMEOUT,
                get: TIMEOUT,
                control: TIMEOUT,
            },
            token_file: None,
            tcp_connections_per_node: 1,
            ..Options::default()
        };
        let wires = Arc::new(Wires {
            net: Arc::clone(net),
            from: Process::Client(number),
            life: life.clone(),
        });
        let host = HostId(1_000 + number as u128);
        match kvpool_client::simulation::connect(options, host, wires).await {
            Ok(client) => return client,
            Err(error) => {
                net.trace.note(
                    Process::Client(number),
                    format_args!("cannot connect: {error}"),
                );
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A lease, and each block that it is on with the latest version that the block can have.
struct Held<'k> {
    lease: proto::Lease,
    epoch: u64,
    found: Vec<(&'k Key, u64)>,
}

/// A call of an ambush, and its key; `None` for any key.
pub(crate) type Touch = (Option<u64>, Call);

/// One task of one life of a client.
pub(crate) struct Task {
    pub(crate) load: Arc<Load>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) who: Process,
    /// The keys of the client's namespace.
    pub(crate) keys: Range<u64>,
    /// Whether the blocks of the namespace all stay.
    pub(crate) keeps_all: bool,
    pub(crate) dice: Dice,
    pub(crate) client: Client,
}

impl Load {
    pub(crate) fn violate(&self, what: String) {
        self.net.trace.note("****", &what);
        self.violations.lock().push(what);
    }
}

/// Counts a call as running until it is dropped.
struct Running<'l>(&'l Load);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Task {
    pub(crate) async fn run(self) {
        while !self.load.is_over.load(Ordering::Acquire) {
            let pause = match self.dice.below(4) {
                0 => self.dice.micros(0, 2_000),
                _ => self.dice.micros(0, self.plan.longest_pause),
            };
            sleep(pause).await;
            let key = self.some_key();
            self.make(self.plan.mix.draw(&self.dice), key).await;
        }
    }

    /// Makes the calls of ambushes: each for a key, or for any.
    pub(crate) async fn lie_in_wait(self, calls: mpsc::UnboundedReceiver<Touch>) {
        let calls = UnboundedReceiverStream::new(calls);
        let make = async |(key, call): Touch| {
            let key = key.filter(|key| self.keys.contains(key));
            let key = key.unwrap_or_else(|| self.some_key());
            if !self.load.is_over.load(Ordering::Acquire) {
                self.make(call, key).await;
            }
        };
        calls.for_each_concurrent(CALLS_AT_ONCE, make).await;
    }

    /// Makes a call for a key, or for some from there on.
    async fn make(&self, call: Call, key: u64) {
        let begun = Instant::now();
        self.load.running.fetch_add(1, Ordering::AcqRel);
        let running = Running(&self.load);
        let (mut batch, mut replaces, mut removes) = (Vec::new(), false, false);
        let what = match call {
            Call::Put => {
                batch = self.batch_from(key);
                let share = self.plan.removed_at_once;
                removes = share > 0 && !self.keeps_all && self.dice.chance(share);
                self.put(batch.clone(), false).await
            }
            Call::Upsert if !self.keeps_all => self.put(self.batch_from(key), true).await,
            Call::Remove if !self.keeps_all => self.remove(key).await,
            Call::Exist => self.exist(self.range_from(key)).await,
            Call::Prefix => self.prefix(self.range_from(key)).await,
            Call::ChangeReplicas if self.plan.nodes > 1 => {
                self.change_replicas(self.range_from(key)).await
            }
            Call::Hold => {
                let keys = self.to_hold(key);
                replaces = !self.keeps_all && self.dice.chance(200);
                let held = self.hold(keys.clone(), replaces).await;
                batch = keys;
                held
            }
            _ => self.get(self.batch_from(key)).await,
        };
        self.judge_time(begun, &what);
        if replaces {
            // The versions that it holds leave their places at once.
            let begun = Instant::now();
            let what = self.put(batch.clone(), true).await;
            self.judge_time(begun, &what);
        }
        if removes {
            sleep(self.dice.micros(0, 8_000)).await;
            for key in batch {
                let begun = Instant::now();
                let what = self.remove(key).await;
                self.judge_time(begun, &what);
            }
        }
        drop(running);
    }

    /// A call ends by its deadline.
    fn judge_time(&self, begun: Instant, what: &str) {
        let took = begun.elapsed();
        self.note(format_args!("{what}, within {} ms", took.as_millis()));
        if took > TIMEOUT + GRACE {
            let took = took.as_millis();
            let late = format!("{} {what}: only after {took} ms", self.who);
            self.load.violate(late);
        }
    }

    fn note(&self, what: impl std::fmt::Display) {
        self.load.net.trace.note(self.who, what);
    }

    async fn put(&self, mut keys: Vec<u64>, replaces: bool) -> String {
        // What is said of pins holds for all blocks of a call.
        let hard_pin = keys.first().is_some_and(|key| self.plan.pins(*key));
        keys.retain(|key| self.plan.pins(*key) == hard_pin);
        let history = || self.load.history.lock();
        let mut puts = Vec::with_capacity(keys.len());
        let mut blocks = Vec::with_capacity(keys.len());
        for key in keys {
            let any = self.dice.between(17, self.plan.longest_block);
            let length = self.plan.one_length.unwrap_or(any);
            let length = usize::try_from(length).unwrap_or(17);
            let number = history().begin(key, Some(length), replaces);
            let bytes = bytes_of(key, number, length);
            let mut block = PutBlock::new(name(key), Region::from(bytes).whole());
            block.parent = parent_of(key).map(name);
            puts.push((key, number, length));
            blocks.push(block);
        }
        let options = PutOptions {
            replicas: match self.plan.two_replicas || self.dice.chance(500) {
                true => 2,
                false => 1,
            },
            upsert: replaces,
            hard_pin,
            ..PutOptions::default()
        };
        let mut outcomes = self.client.batch_put(blocks, &options).await.into_iter();
        let verb = if replaces { "upsert" } else { "put" };
        let mut said_of_all = Vec::with_capacity(puts.len());
        for (key, number, length) in puts {
            let (ended, said) = match outcomes.next() {
                Some(Ok(PutOutcome::Stored { replicas })) => {
                    self.load.puts.fetch_add(1, Ordering::Relaxed);
                    let now = Outcome::Done(Instant::now());
                    (now, format!("stored {replicas} times"))
                }
                Some(Ok(PutOutcome::Present)) => (Outcome::Present, "present already".to_owned()),
                Some(Err(PutError::OutcomeUnknown { code, .. })) => {
                    (Outcome::Unknown, format!("outcome unknown ({code})"))
                }
                Some(Err(error)) => {
                    self.load.failures.fetch_add(1, Ordering::Relaxed);
                    (Outcome::Failed, format!("failed: {error}"))
                }
                None => (Outcome::Unknown, "no outcome".to_owned()),
            };
            history().end(key, number, ended);
            said_of_all.push(format!(
                "{verb} {number} of key {key}, {length} bytes: {said}"
            ));
        }
        said_of_all.join("; ")
    }

    async fn remove(&self, key: u64) -> String {
        if self.plan.pins(key) {
            return self.remove_pinned(key).await;
        }
        let number = self.load.history.lock().begin(key, None, true);
        let (begun, term) = (Instant::now(), self.term());
        let force = self.dice.chance(500);
        let removed = self
            .client
            .remove(Remove::Keys(vec![name(key)]), force)
            .await;
        let takes = matches!(&removed, Ok(removed) if removed.removed > 0);
        if let Some(term) = term.filter(|_| takes && !force) {
            self.judge_removal(key, number, begun, term);
        }
        let (ended, said) = match removed {
            // A leased block stays; then nothing says that it is gone.
            Ok(removed) if removed.removed > 0 || removed.codes == [Code::Missing] => {
                (Outcome::Done(Instant::now()), format!("{removed:?}"))
            }
            Ok(removed) => (Outcome::Failed, format!("{removed:?}")),
            Err(error @ RemoveError::Failed(_)) => (Outcome::Failed, error.to_string()),
            Err(error) => (Outcome::Unknown, error.to_string()),
        };
        self.load.history.lock().end(key, number, ended);
        format!("remove {number} of key {key}: {said}")
    }

    /// The master that leads, if one does, and its pool.
    fn leading(&self) -> Option<(usize, Arc<Pool>)> {
        let masters = self.load.net.masters().into_iter();
        let mut pools = masters.filter_map(|(number, seat)| Some((number, seat.pool().ok()?)));
        pools.find(|(_, pool)| pool.leads())
    }

    /// The pool that leads, if one does.
    fn leader(&self) -> Option<Arc<Pool>> {
        self.leading().map(|(_, pool)| pool)
    }

    /// The epoch of the leader.
    fn term(&self) -> Option<u64> {
        self.leader().map(|pool| pool.epoch.0)
    }

    /// A removal without force took a block, and began in this term. No reader had a lease of an earlier one: the
    /// leader takes all blocks of earlier terms for leased. The key may have another block than the reader knows.
    fn judge_removal(&self, key: u64, number: PutNumber, begun: Instant, term: u64) {
        let Process::Client(client) = self.who else {
            return;
        };
        let tenant = self.plan.tenant_of(client);
        // A process may give its own leases back first.
        let is_other = |other| other != client && other < self.plan.clients;
        let is_of = |other| is_other(other) && self.plan.tenant_of(other) == tenant;
        let leases = &self.load.net.promises.leases;
        let Some(lease) = leases.before(term, &name(key), begun, is_of) else {
            return;
        };
        let history = self.load.history.lock();
        let is_same = !history.may_have_changed_beside(key, lease.asked, Some(number));
        drop(history);
        if is_same {
            let what = lease.what;
            self.load.violate(format!(
                "{what}, and a removal without force took the block in epoch {term}"
            ));
        }
    }

    async fn get(&self, keys: Vec<u64>) -> String {
        let begun = Instant::now();
        let room = |_: &u64| Region::allocate(Length(self.plan.longest_block));
        let memory: Vec<Region> = keys.iter().map(room).collect();
        let gets = keys.iter().zip(&memory);
        let gets = gets.map(|(key, memory)| GetBlock::new(name(*key), memory.whole()));
        let options = GetOptions {
            release: self.dice.chance(200),
            ..GetOptions::default()
        };
        let outcomes = self.client.batch_get(gets.collect(), &options).await;
        let mut outcomes = outcomes.into_iter();
        let said = keys.iter().zip(&memory).map(|(key, memory)| {
            let said = self.see(*key, begun, memory, outcomes.next());
            format!("get of key {key}: {said}")
        });
        said.collect::<Vec<_>>().join("; ")
    }

    /// Gets every block of the namespace.
    pub(crate) async fn get_all(&self) {
        for first in self.keys.clone().step_by(8) {
            let keys = (first..self.keys.end.min(first + 8)).collect();
            let what = self.get(keys).await;
            self.note(what);
        }
    }

    /// Takes leases, as a process with a view of the blocks. Renews them later or gives them back, perhaps after
    /// their end, or does neither: then it returns `at_once`.
    async fn hold(&self, keys: Vec<u64>, at_once: bool) -> String {
        let net = &self.load.net;
        let Some(cluster) = *net.cluster.lock() else {
            return "nobody leads yet".to_owned();
        };
        let Process::Client(number) = self.who else {
            return "no client".to_owned();
        };
        let caller = |epoch| {
            Some(proto::Caller {
                epoch,
                cluster_id: cluster.to_bytes().to_vec().into(),
                client_id: vec![0x77; 16].into(),
                host_id: vec![0x77; 16].into(),
                namespace: tenant_name(self.plan.tenant_of(number)),
                wait_ms: 1_000,
                ..proto::Caller::default()
            })
        };
        let names: Vec<Key> = keys.iter().copied().map(name).collect();
        let presence = self.dice.chance(PRESENCE);
        let held = match presence {
            true => self.hold_presence(&names, caller(0)).await,
            false => self.hold_places(&names, caller(0)).await,
        };
        let Some(Held {
            lease,
            epoch,
            found,
        }) = held
        else {
            return format!("does not hold keys {keys:?}");
        };
        let (names, versions): (Vec<&Key>, Vec<u64>) = found.into_iter().unzip();
        let packed: Bytes = pack(names).into();
        let then = if at_once { 3 } else { self.dice.below(4) };
        if then < 2 {
            sleep(self.dice.micros(0, HELD)).await;
        }
        match then {
            0 => {
                let renewal = proto::RenewRequest {
                    caller: caller(epoch),
                    keys: packed,
                    token: lease.token,
                    versions,
                    presence,
                };
                self.ask("Renew", &renewal).await;
                format!("holds keys {keys:?}, and renews the lease")
            }
            1 => {
                let release = proto::ReleaseRequest {
                    caller: caller(epoch),
                    keys: packed,
                    token: lease.token,
                    versions,
                    ..proto::ReleaseRequest::default()
                };
                self.ask("Release", &release).await;
                format!("held keys {keys:?}")
            }
            _ => format!("holds keys {keys:?}"),
        }
    }

    /// A lease on the places of blocks.
    async fn hold_places<'k>(
        &self,
        names: &'k [Key],
        caller: Option<proto::Caller>,
    ) -> Option<Held<'k>> {
        let lookup = proto::LookupRequest {
            caller,
            keys: pack(names).into(),
            no_lease: false,
        };
        let reply = self.ask("Lookup", &lookup).await?;
        let reply = proto::LookupReply::decode(reply).ok()?;
        let found = names.iter().zip(&reply.locations);
        let found = found.filter(|(_, location)| !location.replicas.is_empty());
        Some(Held {
            lease: reply.lease?,
            epoch: reply.epoch,
            found: found.map(|(name, at)| (name, at.version)).collect(),
        })
    }

    /// A lease on the presence of blocks, in memory or on disks.
    async fn hold_presence<'k>(
        &self,
        names: &'k [Key],
        caller: Option<proto::Caller>,
    ) -> Option<Held<'k>> {
        let exist = proto::ExistRequest {
            caller,
            keys: pack(names).into(),
            no_lease: false,
        };
        let reply = self.ask("Exist", &exist).await?;
        let reply = proto::ExistReply::decode(reply).ok()?;
        let lease = reply.lease?;
        let is_there = |at: usize| {
            let byte = reply.present.get(at / 8);
            byte.is_some_and(|byte| byte & 1 << (at % 8) != 0)
        };
        let found = names.iter().enumerate();
        let found = found.filter(|(at, _)| is_there(*at));
        Some(Held {
            lease,
            epoch: reply.epoch,
            found: found.map(|(_, name)| (name, lease.newest)).collect(),
        })
    }

    /// Some keys to hold: half the time of blocks that lie on disks alone.
    fn to_hold(&self, key: u64) -> Vec<u64> {
        if self.plan.has_disks() && self.dice.chance(500) {
            let cold = self.cold_keys();
            if !cold.is_empty() {
                let first = self.dice.index(cold.len());
                return cold.into_iter().skip(first).take(3).collect();
            }
        }
        self.batch_from(key)
    }

    /// The keys of this namespace whose blocks have a copy on a disk, and no replica in memory.
    fn cold_keys(&self) -> Vec<u64> {
        let Process::Client(number) = self.who else {
            return Vec::new();
        };
        let Some(pool) = self.leader() else {
            return Vec::new();
        };
        let Ok(namespace) = pool.namespace(&tenant_name(self.plan.tenant_of(number))) else {
            return Vec::new();
        };
        let keys_of = |blocks: Vec<StoredBlock>| -> BTreeSet<String> {
            let here = blocks.into_iter();
            let here = here.filter(|block| block.namespace == namespace);
            here.map(|block| block.key.to_string()).collect()
        };
        let (copies, blocks) = (keys_of(pool.stored_copies()), keys_of(pool.stored_blocks()));
        let is_cold = |key: &u64| {
            let text = name(*key).to_string();
            copies.contains(&text) && !blocks.contains(&text)
        };
        self.keys.clone().filter(is_cold).collect()
    }

    /// A call of a master by hand.
    async fn ask(&self, method: &'static str, request: &impl Message) -> Option<Bytes> {
        let net = Arc::clone(&self.load.net);
        let some = self.dice.index(self.plan.masters());
        let leader = self.leading().filter(|_| self.dice.chance(TO_LEADER));
        let master = master_address(leader.map_or(some, |(number, _)| number));
        let request = request.encode_to_vec().into();
        let call = net.call(self.who, Life::default(), master, method, request);
        timeout(ASKING, call).await.ok()?.ok()
    }

    /// Looks at what a get has brought.
    fn see(
        &self,
        key: u64,
        begun: Instant,
        memory: &Region,
        outcome: Option<Result<GetOutcome, impl std::fmt::Display>>,
    ) -> String {
        match outcome {
            Some(Ok(GetOutcome::Hit { length, version })) => {
                self.load.hits.fetch_add(1, Ordering::Relaxed);
                let bytes = memory.whole().to_vec();
                let bytes = bytes.get(..length.as_usize()).unwrap_or_default();
                let seen = self
                    .load
                    .history
                    .lock()
                    .see(self.who, key, begun, bytes, version);
                match seen {
                    Ok(number) => format!("put {number}, version {version}"),
                    Err(wrong) => {
                        self.load.violate(wrong);
                        "wrong".to_owned()
                    }
                }
            }
            Some(Ok(GetOutcome::Miss)) => {
                self.load.misses.fetch_add(1, Ordering::Relaxed);
                self.judge_presence("get", key, begun, false);
                "miss".to_owned()
            }
            Some(Err(error)) => {
                // At rest a node stops under gets.
                let is_load = !self.load.is_over.load(Ordering::Acquire);
                self.load
                    .failures
                    .fetch_add(u64::from(is_load), Ordering::Relaxed);
                format!("failed: {error}")
            }
            None => "no outcome".to_owned(),
        }
    }

    /// A key; the first few are used more than others.
    fn some_key(&self) -> u64 {
        let count = self.keys.end - self.keys.start;
        let count = if self.dice.chance(250) {
            count.min(3)
        } else {
            count
        };
        self.keys.start + self.dice.below(count)
    }

    /// This key, or it and some behind it.
    fn batch_from(&self, key: u64) -> Vec<u64> {
        let count = match self.dice.chance(250) {
            true => self.dice.between(2, 5),
            false => 1,
        };
        (key..self.keys.end.min(key + count)).collect()
    }

    /// This key and those behind it, six at most.
    fn range_from(&self, key: u64) -> Range<u64> {
        key..self.keys.end.min(key + 6)
    }

    /// Asks for a further replica of some blocks, or moves them to another node.
    async fn change_replicas(&self, keys: Range<u64>) -> String {
        let node = || format!("n{}", self.dice.index(self.plan.nodes));
        let change = match self.dice.below(5) {
            0 | 1 => ReplicaChange::Copy,
            2 | 3 => ReplicaChange::Move,
            _ => ReplicaChange::Drop,
        };
        let has_source = change != ReplicaChange::Copy;
        let has_target = change != ReplicaChange::Drop;
        let wish = ReplicaWish {
            change,
            blocks: ReplicaBlocks::Keys(keys.clone().map(name).collect()),
            from: (!has_target || has_source && self.dice.chance(300)).then(node),
            to: (has_target && self.dice.chance(300))
                .then(node)
                .into_iter()
                .collect(),
            evict: has_target && !self.keeps_all && self.dice.chance(300),
        };
        let any = || "any node".to_owned();
        let said = format!(
            "{change:?} of keys {keys:?} from {} to {}, evicts: {}",
            wish.from.clone().unwrap_or_else(any),
            wish.to.first().cloned().unwrap_or_else(any),
            wish.evict
        );
        match self.client.change_replicas(&wish).await {
            Ok(task) => format!("{said}: task {}", task.id),
            Err(error) => format!("{said}: {error}"),
        }
    }

    async fn exist(&self, keys: Range<u64>) -> String {
        let begun = Instant::now();
        let names: Vec<Key> = keys.clone().map(name).collect();
        match self.client.is_exist(&names).await {
            Ok(present) => {
                for (key, is_there) in keys.clone().zip(&present) {
                    self.judge_presence("exist", key, begun, *is_there);
                }
                format!("exist of keys {keys:?}: {present:?}")
            }
            Err(error) => format!("exist of keys {keys:?} failed: {error}"),
        }
    }

    /// Judges whether a key is there, as a call says that began at `begun`.
    fn judge_presence(&self, call: &str, key: u64, begun: Instant, is_there: bool) {
        let history = self.load.history.lock();
        if is_there && !history.may_be_there(key, begun) {
            let wrong = format!("{} {call}: key {key} is there, which nobody put", self.who);
            self.load.violate(wrong);
        }
        if !is_there {
            let what = format!("{} {call}: key {key} is absent", self.who);
            let mut whole = self.load.whole.lock();
            whole.missed(self.who, begun, key, what);
        }
    }

    async fn prefix(&self, keys: Range<u64>) -> String {
        let begun = Instant::now();
        let names: Vec<Key> = keys.clone().map(name).collect();
        match self.client.match_prefix(&names).await {
            Ok(prefix) => {
                let blocks = prefix.blocks;
                for (at, key) in keys.clone().enumerate().take(blocks + 1) {
                    self.judge_presence("match_prefix", key, begun, at < blocks);
                }
                // Held for a while, as an engine does that is about to get the blocks.
                sleep(self.dice.micros(0, 60_000)).await;
                drop(prefix);
                format!("match_prefix of keys {keys:?}: {blocks}")
            }
            Err(error) => format!("match_prefix of keys {keys:?} failed: {error}"),
        }
    }
}
