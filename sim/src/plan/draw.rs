//! What chance puts into a plan.

use super::{DiskFault, Fault, LATE_DROP, Mix, Noise, Plan, Process, Tenant};
use crate::dice::{Dice, Stream};
use kvpool_types::Setting;
use kvpool_types::medium::GRANULE;

impl Plan {
    /// The plan of a seed.
    pub fn of(seed: u64) -> Self {
        let dice = Dice::new(seed, Stream::Plan);
        let electing = match dice.below(4) {
            0 => 0,
            1 | 2 => 2,
            _ => 3,
        };
        let keeps_all = dice.chance(250);
        let longest_block = [3_000, 40_000, 150_000][dice.index(3)];
        let keys = dice.between(8, 60);
        let nodes = usize::try_from(dice.between(1, 3)).unwrap_or(1);
        let segment_bytes = if keeps_all {
            8 << 20
        } else {
            // Between a third and all of the keys fit.
            let all = keys * longest_block / 2 / nodes as u64;
            let share = all * dice.between(30, 110) / 100;
            share.max(3 * longest_block).next_multiple_of(64 << 10)
        };
        let calm = dice.chance(150);
        let noise = |most| if calm { 0 } else { dice.below(most) };
        let mut plan = Self {
            seed,
            electing,
            nodes,
            segment_bytes,
            segments: usize::try_from(dice.between(1, 2)).unwrap_or(1),
            disk_bytes: 0,
            ssd_drop_ms: None,
            evicts_by_use: false,
            longest_pause: 150_000,
            mix: Mix::USUAL,
            removed_at_once: 0,
            writes_per_day: None,
            clients: usize::try_from(dice.between(1, 3)).unwrap_or(1),
            tasks: usize::try_from(dice.between(1, 3)).unwrap_or(1),
            keys,
            longest_block,
            one_length: None,
            two_replicas: false,
            length_ms: dice.between(4_000, 14_000),
            lease_ms: dice.between(300, 3_000),
            drop_ms: LATE_DROP,
            keeps_all,
            tenants: vec![Tenant::default()],
            settings_late_ms: 0,
            pins: Vec::new(),
            has_signed_reads: seed % 2 == 1,
            drift: (0..electing.max(1))
                .map(|_| i64::try_from(dice.below(1000)).unwrap_or(0) - 500)
                .collect(),
            noise: Noise {
                lost: noise(15),
                twice: noise(15),
                slow: noise(25),
                slow_disk: 0,
                flipped: noise(15),
                flipped_writes: 0,
            },
            faults: Vec::new(),
            ambushes: Vec::new(),
            departs: None,
        };
        let count = if calm {
            dice.below(3)
        } else {
            dice.between(1, 10)
        };
        for _ in 0..count {
            let at = dice.between(200, plan.length_ms);
            let fault = plan.draw_fault(&dice);
            plan.faults.push((at, fault));
        }
        if !keeps_all {
            plan.draw_tenants();
        }
        // A block with a wrong byte is lost, which excuses what is missing: half of the histories have none.
        if Dice::new(seed, Stream::Flips).chance(500) {
            plan.noise.flipped = 0;
        }
        if !plan.keeps_a_namespace() {
            plan.noise.flipped_writes = plan.noise.flipped;
            let drops = Dice::new(seed, Stream::Drops);
            if drops.chance(250) {
                plan.drop_ms = drops.between(1_200, 3_000);
            }
        }
        plan.draw_lengths();
        plan.draw_disks();
        plan.draw_removals();
        plan.draw_outages();
        plan.draw_scarcity();
        plan.draw_relapses();
        plan.draw_turnover();
        plan.draw_deaths();
        plan.draw_mix();
        plan.draw_bursts();
        plan.draw_ambushes();
        plan.draw_theme();
        plan.draw_moves();
        plan.draw_meeting();
        plan.draw_absence();
        plan.draw_media_quotas();
        plan.draw_late_settings();
        plan.draw_narrow_disks();
        plan.draw_returns();
        plan.draw_old_images();
        plan.draw_superblocks();
        plan.draw_detachments();
        plan.draw_pins();
        plan.draw_budget();
        plan.draw_operator();
        plan.draw_quiet_drains();
        plan.draw_late_media();
        plan.draw_departures();
        plan.draw_granules();
        plan.faults.sort_by_key(|(at, _)| *at);
        plan
    }

    /// From a stream of its own, so that the rest of the plan is as without it.
    fn draw_tenants(&mut self) {
        let dice = Dice::new(self.seed, Stream::Tenants);
        if !dice.chance(400) {
            return;
        }
        let pool_bytes = self.segment_bytes * self.nodes as u64;
        let count = dice.between(1, 3);
        let drawn = (0..count).map(|_| Tenant::drawn(&dice, pool_bytes, self.longest_block));
        self.tenants = drawn.collect();
        let keeper = Tenant::keeper(pool_bytes, self.nodes as u64, self.longest_block);
        if dice.chance(400)
            && let (Some(keeper), Some(first)) = (keeper, self.tenants.first_mut())
        {
            *first = keeper;
        }
        // Somebody else makes room necessary.
        self.clients = self.clients.max(self.tenants.len().min(2));
        for _ in 0..dice.below(4) {
            let tenant = dice.index(self.tenants.len());
            if self.tenants.get(tenant).is_some_and(Tenant::keeps_all) {
                continue;
            }
            let hard = (pool_bytes * dice.between(10, 90) / 100).max(self.longest_block + 4096);
            let fault = match dice.below(2) {
                0 => Fault::Quota(tenant, hard),
                _ => Fault::Delete(tenant, dice.between(1, 1_500)),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own.
    fn draw_disks(&mut self) {
        let dice = Dice::new(self.seed, Stream::Disks);
        if !dice.chance(500) {
            return;
        }
        // A zone has a mebibyte, and there are at least two.
        self.disk_bytes = dice.between(2, 6) << 20;
        if dice.chance(500) {
            self.add_roomy_disks(&dice);
        }
        self.evicts_by_use = dice.chance(500);
        if !self.keeps_a_namespace() {
            self.halve_memory();
            self.longest_pause = 40_000;
        }
        self.writes_per_day = dice.chance(200).then(|| dice.between(1_000, 100_000));
        for _ in 0..dice.below(5) {
            let node = dice.index(self.nodes);
            let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
            let fault = match dice.below(9) {
                8 => match dice.index(self.nodes) {
                    from if from == node => Fault::RolledBack(node, ms),
                    from => Fault::Cloned(from, node, ms),
                },
                0 | 1 => Fault::PowerCut(node, ms),
                2 => Fault::RolledBack(node, ms),
                3 => Fault::Disk(node, DiskFault::Stalls, ms),
                4 => Fault::Disk(node, DiskFault::Fails, ms),
                5 => Fault::Disk(node, DiskFault::IsFull, ms),
                6 => Fault::Disk(node, DiskFault::IsGone, ms),
                _ => Fault::Disk(node, DiskFault::Rots, ms),
            };
            let at = dice.between(200, self.length_ms);
            if let Fault::Cloned(from, ..) = fault
                && dice.chance(600)
            {
                // The copy comes while its original is away.
                let away = 2 * ms + 2_000;
                self.faults
                    .push((at + ms / 2, Fault::Crash(Process::Node(from), away)));
            }
            self.faults.push((at, fault));
        }
    }

    /// From a stream of its own. Engines put blocks of one length, and their places are used again as they were.
    fn draw_lengths(&mut self) {
        let dice = Dice::new(self.seed, Stream::Lengths);
        if dice.chance(350) {
            self.one_length = Some(dice.between(self.longest_block / 4, self.longest_block / 2));
        }
    }

    /// From a stream of its own. A disk writes blocks of whole granules straight into memory.
    fn draw_granules(&mut self) {
        if Dice::new(self.seed, Stream::Granules).chance(700) {
            let whole = |length: u64| length.next_multiple_of(GRANULE).min(self.longest_block);
            self.one_length = self.one_length.map(whole);
        }
    }

    /// From a stream of its own. Blocks are removed while they are copied to a disk, or just after.
    fn draw_removals(&mut self) {
        let dice = Dice::new(self.seed, Stream::Removals);
        if self.has_disks() && !self.keeps_all && dice.chance(350) {
            self.removed_at_once = dice.between(50, 500);
        }
    }

    /// From a stream of its own. A rack loses its power, a switch port dies, or the network falls apart in two halves.
    fn draw_outages(&mut self) {
        let dice = Dice::new(self.seed, Stream::Outages);
        if !dice.chance(200) {
            return;
        }
        let masters = (0..self.masters()).map(Process::Master);
        let servers: Vec<Process> = masters.chain((0..self.nodes).map(Process::Node)).collect();
        let clients = (0..self.clients).map(Process::Client);
        let all: Vec<Process> = servers.iter().copied().chain(clients).collect();
        let at = dice.below(self.length_ms);
        let ms = dice.between(50, [500, 4_000][dice.index(2)]);
        let apart: Vec<Process> = match dice.below(3) {
            0 if !self.keeps_all => {
                for process in servers {
                    let down = dice.between(30, 2_000);
                    self.faults.push((at, Fault::Crash(process, down)));
                }
                return;
            }
            0 | 1 => vec![servers[dice.index(servers.len())]],
            _ => all.iter().copied().filter(|_| dice.chance(500)).collect(),
        };
        for here in &apart {
            for there in all.iter().filter(|there| !apart.contains(there)) {
                self.faults.push((at, Fault::Cut(*here, *there, ms)));
                self.faults.push((at, Fault::Cut(*there, *here, ms)));
            }
        }
    }

    /// From a stream of its own. A node starts while its disk fails, so that superblocks and flushes fail too. The
    /// power fails just then.
    fn draw_relapses(&mut self) {
        let dice = Dice::new(self.seed, Stream::Relapses);
        if !self.has_disks() || self.keeps_all || !dice.chance(350) {
            return;
        }
        for _ in 0..dice.between(1, 3) {
            let node = dice.index(self.nodes);
            let mut at = dice.between(200, self.length_ms);
            let fails = Fault::Disk(node, DiskFault::Fails, dice.between(500, 4_000));
            self.faults.push((at, fails));
            for _ in 0..dice.between(1, 5) {
                at += dice.between(20, 900);
                let down = dice.between(30, 200);
                // The first format of a blank disk fails too.
                let fault = match dice.chance(350) {
                    true => Fault::NewDisk(node, down),
                    false => Fault::PowerCut(node, down),
                };
                self.faults.push((at, fault));
            }
        }
    }

    /// From a stream of its own.
    fn draw_scarcity(&mut self) {
        let dice = Dice::new(self.seed, Stream::Scarcity);
        if !dice.chance(400) {
            return;
        }
        // Blocks that all stay need the memory that was planned for them.
        let stay = |tenant: &Tenant| tenant.settings.get(Setting::Guaranteed).is_some();
        let may_shrink = !self.keeps_all && !self.tenants.iter().any(stay);
        for _ in 0..dice.between(1, 3) {
            let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
            let fault = match may_shrink && dice.chance(500) {
                true => Fault::LittleMemory(dice.index(self.nodes), dice.between(30, 95), ms),
                false => Fault::StoreFull(ms),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own. Masters follow each other while leases of their predecessors run, and room is used
    /// again soon.
    fn draw_turnover(&mut self) {
        let dice = Dice::new(self.seed, Stream::Turnover);
        if !dice.chance(250) {
            return;
        }
        self.lease_ms = dice.between(2_000, 6_000);
        self.longest_pause = self.longest_pause.min(30_000);
        for _ in 0..dice.between(2, 5) {
            let master = dice.index(self.masters());
            let ms = dice.between(30, 300);
            let fault = match dice.below(3) {
                0 => Fault::Crash(Process::Master(master), ms),
                _ => Fault::Retire(master, ms),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own. Readers of the next leader hold leases of the one that died.
    fn draw_deaths(&mut self) {
        let dice = Dice::new(self.seed, Stream::Deaths);
        if !dice.chance(300) {
            return;
        }
        self.lease_ms = dice.between(2_000, 6_000);
        self.longest_pause = self.longest_pause.min(30_000);
        for _ in 0..dice.between(1, 3) {
            let at = dice.between(200, self.length_ms);
            // Two leaders in a row die within one lease.
            for later in 0..dice.between(1, 2) {
                let fault = Fault::LeaderDies(dice.between(30, 300));
                self.faults.push((at + 700 * later, fault));
            }
        }
    }

    pub(super) fn draw_fault(&self, dice: &Dice) -> Fault {
        let master = dice.index(self.masters());
        let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
        match dice.below(17) {
            15 | 16 => Fault::Intruder(dice.index(self.nodes)),
            0 | 1 => Fault::Crash(Process::Master(master), ms),
            2 => Fault::Crash(Process::Node(dice.index(self.nodes)), ms),
            3 => Fault::Crash(Process::Client(dice.index(self.clients)), ms),
            4 => Fault::Stop(self.draw_process(dice), ms),
            5 | 6 => {
                let (from, to) = self.draw_pair(dice);
                Fault::Cut(from, to, ms)
            }
            7 => Fault::StoreStalls(master, ms),
            8 => Fault::StoreUnknown(master, ms.min(400)),
            9 => Fault::ClockJumps(master, ms),
            10 => Fault::Leave(dice.index(self.nodes), ms),
            14 => Fault::Retire(master, ms),
            11 | 12 => Fault::Drain(dice.index(self.nodes), ms),
            _ => Fault::Stop(Process::Node(dice.index(self.nodes)), ms),
        }
    }

    /// Two processes that have a connection.
    fn draw_pair(&self, dice: &Dice) -> (Process, Process) {
        loop {
            let (from, to) = (self.draw_process(dice), self.draw_process(dice));
            let are_clients = matches!((from, to), (Process::Client(_), Process::Client(_)));
            if from != to && !are_clients {
                return (from, to);
            }
        }
    }

    fn draw_process(&self, dice: &Dice) -> Process {
        match dice.below(3) {
            0 => Process::Master(dice.index(self.masters())),
            1 => Process::Node(dice.index(self.nodes)),
            _ => Process::Client(dice.index(self.clients)),
        }
    }
}
