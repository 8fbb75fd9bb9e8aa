//! The table of all cases.

mod full;
mod secured;
#[cfg(test)]
mod tests;

use super::{
    Bare, Blocks, Bound, Case, Copier, Goal, Kept, Metric, Path, Place, Pool, SMALL, What, size,
};
use crate::agent::protocol::Way;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The shapes of batches: blocks of one call, and bytes of a block.
const BATCHES: [(u64, u64); 3] = [(32, MIB), (128, 256 * KIB), (16, 8 * MIB)];

/// The block sizes of single puts and gets. The smallest size is apart, because its latency counts.
const SINGLES: [u64; 3] = [64 * KIB, MIB, 16 * MIB];

/// Blocks of 64 layers of 16 KiB, 32 side by side.
const LAYERED: Blocks = Blocks {
    bytes: MIB,
    pieces: 64,
    group: 32,
    chained: false,
    kept: Kept::Span,
};

/// The blocks of the pool of keys.
pub(super) const KEYS: Blocks = few(SMALL, 100_000);
/// The blocks of the larger pool of keys.
pub(super) const MILLION: Blocks = few(SMALL, 1_000_000);

/// The chain of the cases of `match_prefix`.
pub(super) const CHAIN: Blocks = Blocks {
    chained: true,
    ..few(SMALL, 2048)
};

const PING: Bare = Bare::Ping {
    request: 1,
    answer: 1,
    spin: false,
    one_core: false,
};
const SPINNING_PING: Bare = Bare::Ping {
    request: 1,
    answer: 1,
    spin: true,
    one_core: false,
};

const NOT_ASKED: Goal = Goal::None("for information: nothing is asked of it");
const NO_LIMIT: &str = "no plain code does the same";
const NO_RDMA_LIMIT: &str = "bare RDMA is measured by perftest, outside of this command";

/// Every transport between a client and a node.
const WAYS: [Way; 3] = [Way::Shm, Way::Rdma, Way::Tcp];

const fn streams(streams: usize) -> Bare {
    Bare::Stream {
        streams,
        pinned: false,
        tls: false,
    }
}

/// As many blocks as fill the span.
const fn span(bytes: u64) -> Blocks {
    Blocks {
        bytes,
        pieces: 1,
        group: 1,
        chained: false,
        kept: Kept::Span,
    }
}

/// A fixed number of blocks.
const fn few(bytes: u64, count: u64) -> Blocks {
    Blocks {
        bytes,
        pieces: 1,
        group: 1,
        chained: false,
        kept: Kept::Exactly(count),
    }
}

/// Single blocks of 4 KiB, enough that each put finds a free place.
pub(super) const FOUR_KIB: Blocks = few(4 * KIB, 4096);

/// The name of a transport in the names of cases.
const fn way_name(way: Way) -> &'static str {
    match way {
        Way::Shm => "shm",
        Way::Rdma => "rdma",
        Way::Tcp => "tcp",
    }
}

const fn at(pool: Pool, way: Way) -> Place {
    Place {
        pool,
        way,
        remembers: false,
        spins: false,
        path: match way {
            Way::Tcp => Path::Veth,
            Way::Shm | Way::Rdma => Path::Loopback,
        },
        clients: 1,
    }
}

/// The bound of puts and gets.
fn moving(way: Way, blocks: Blocks) -> Bound {
    match way {
        Way::Shm => Bound::Bare(Bare::Copy(blocks, 1, Copier::Fastest)),
        Way::Rdma => Bound::None(NO_RDMA_LIMIT),
        Way::Tcp => Bound::StreamsAsUsed,
    }
}

/// The goal of puts and gets: a share of their bound, if they have one.
fn share(way: Way, least: f64) -> Goal {
    match way {
        Way::Shm | Way::Tcp => Goal::RatioAtLeast(least),
        Way::Rdma => Goal::None(NO_RDMA_LIMIT),
    }
}

/// All cases, in the order in which they are measured.
pub(crate) fn table() -> Vec<Case> {
    let mut table = machine();
    table.extend(batches());
    table.extend(layered());
    table.extend(readers());
    table.extend(singles());
    table.extend(small_blocks());
    table.extend(first_writes());
    table.extend(local());
    table.extend(keys());
    table.extend(full::cases());
    table.extend(memory());
    table.extend(secured::cases(&table));
    table
}

fn machine() -> Vec<Case> {
    let case = |id: &str, bare, metric| Case {
        id: format!("machine/{id}"),
        group: "limits of this machine",
        place: at(Pool::Main, Way::Shm),
        what: What::Machine(bare),
        metric,
        bound: Bound::None("it is a limit itself"),
        goal: Goal::None("it is what others are compared with"),
    };
    let copy = |copier| Bare::Copy(span(MIB), 1, copier);
    vec![
        case("memcpy-1MiB", copy(Copier::Plain), Metric::Rate),
        case(
            "memcpy-1MiB-streaming",
            copy(Copier::Streaming),
            Metric::Rate,
        ),
        case(
            "memcpy-16KiB-pieces",
            Bare::Copy(LAYERED, 1, Copier::Fastest),
            Metric::Rate,
        ),
        case("tcp-1-stream", streams(1), Metric::Rate),
        case("tcp-2-streams", streams(2), Metric::Rate),
        case(
            "tcp-2-streams-a-core-each",
            Bare::Stream {
                streams: 2,
                pinned: true,
                tls: false,
            },
            Metric::Rate,
        ),
        case("tcp-1-stream-cpu", streams(1), Metric::Cpu),
        case("tcp-2-streams-cpu", streams(2), Metric::Cpu),
        case("ping-pong", PING, Metric::P50),
        case(
            "ping-pong-one-core",
            Bare::Ping {
                request: 1,
                answer: 1,
                spin: false,
                one_core: true,
            },
            Metric::P50,
        ),
        case("ping-pong-spinning", SPINNING_PING, Metric::P50),
        case("first-touch", Bare::Touch, Metric::Rate),
    ]
}

/// Puts come first: a put that replaces a block after a get would wait for the lease of the get.
fn puts_then_gets(blocks: Blocks, batch: u64) -> [(&'static str, What); 2] {
    [
        ("put", What::Put(blocks, batch)),
        ("get", What::Get(blocks, batch)),
    ]
}

/// Puts and gets in batches. The cases of one shape follow each other, so their set is put once.
fn batches() -> Vec<Case> {
    let mut table = Vec::new();
    for (count, bytes) in BATCHES {
        let blocks = span(bytes);
        for (verb, what) in puts_then_gets(blocks, count) {
            for way in WAYS {
                table.push(Case {
                    id: format!("{}/{verb}/{count}x{}", way_name(way), size(bytes)),
                    group: "batches of blocks, one client",
                    place: at(Pool::Main, way),
                    what,
                    metric: Metric::Rate,
                    bound: moving(way, blocks),
                    goal: match way {
                        Way::Tcp => share(way, 0.95),
                        Way::Shm | Way::Rdma => share(way, 0.9),
                    },
                });
            }
        }
    }
    let blocks = span(MIB);
    for (verb, what) in puts_then_gets(blocks, 32) {
        table.push(Case {
            id: format!("tcp-loopback/{verb}/32x1MiB"),
            group: "batches of blocks, one client",
            place: Place {
                path: Path::Loopback,
                ..at(Pool::Main, Way::Tcp)
            },
            what,
            metric: Metric::Rate,
            bound: moving(Way::Tcp, blocks),
            goal: Goal::None("one host uses shared memory: nobody's blocks go over plain loopback"),
        });
    }
    table.push(Case {
        id: "tcp/get-cpu/32x1MiB".to_owned(),
        group: "processor time of client and node together",
        place: at(Pool::Main, Way::Tcp),
        what: What::Get(blocks, 32),
        metric: Metric::Cpu,
        bound: Bound::StreamsAsUsed,
        goal: Goal::AtMost(0.6),
    });
    table.push(Case {
        id: "shm/put-durable/32x1MiB".to_owned(),
        group: "batches of blocks, one client",
        place: at(Pool::Durable, Way::Shm),
        what: What::Put(blocks, 32),
        metric: Metric::Rate,
        bound: moving(Way::Shm, blocks),
        goal: NOT_ASKED,
    });
    table
}

fn layered() -> Vec<Case> {
    let mut table = Vec::new();
    for (verb, what) in puts_then_gets(LAYERED, 32) {
        for way in WAYS {
            table.push(Case {
                id: format!("{}/{verb}/32x64x16KiB", way_name(way)),
                group: "blocks in 64 buffers of 16 KiB",
                place: at(Pool::Main, way),
                what,
                metric: Metric::Rate,
                bound: moving(way, LAYERED),
                goal: share(way, 0.8),
            });
        }
    }
    table
}

fn readers() -> Vec<Case> {
    let blocks = span(MIB);
    let mut table = Vec::new();
    for way in [Way::Shm, Way::Tcp] {
        for clients in [1, 2, 4] {
            let threads = clients.min(2);
            table.push(Case {
                id: format!("{}/readers-{clients}/32x1MiB", way_name(way)),
                group: "readers at once, in all",
                place: Place {
                    clients,
                    ..at(Pool::Main, way)
                },
                what: What::Get(blocks, 32),
                metric: Metric::Rate,
                bound: match way {
                    Way::Shm => Bound::Bare(Bare::Copy(blocks, threads, Copier::Fastest)),
                    Way::Rdma => Bound::None(NO_RDMA_LIMIT),
                    Way::Tcp => Bound::Bare(streams(2)),
                },
                goal: match (way, clients) {
                    (Way::Shm | Way::Rdma, _) => NOT_ASKED,
                    (Way::Tcp, 1) => Goal::None("one client is held to the streams that it uses"),
                    (Way::Tcp, _) => Goal::RatioAtLeast(0.8),
                },
            });
        }
    }
    table
}

fn singles() -> Vec<Case> {
    let mut table = Vec::new();
    for bytes in SINGLES {
        let blocks = span(bytes);
        for (verb, what) in puts_then_gets(blocks, 1) {
            for way in [Way::Shm, Way::Tcp] {
                table.push(Case {
                    id: format!("{}/{verb}/{}", way_name(way), size(bytes)),
                    group: "single blocks",
                    place: at(Pool::Main, way),
                    what,
                    metric: Metric::Rate,
                    bound: moving(way, blocks),
                    goal: NOT_ASKED,
                });
            }
        }
    }
    let view = few(16 * MIB, 4);
    table.push(Case {
        id: "shm/view-known/16MiB".to_owned(),
        group: "views",
        place: Place {
            remembers: true,
            ..at(Pool::Main, Way::Shm)
        },
        what: What::View(view),
        metric: Metric::P50,
        bound: Bound::None("no byte moves"),
        goal: Goal::AtMost(5.0),
    });
    table
}

/// Latencies of the smallest block, and puts of blocks so small that the calls dominate.
fn small_blocks() -> Vec<Case> {
    let case = |id: &str, place, what, metric, bound, goal| Case {
        id: id.to_owned(),
        group: "small blocks",
        place,
        what,
        metric,
        bound,
        goal,
    };
    let ping = || Bound::Bare(PING);
    let known = |way| Place {
        remembers: true,
        ..at(Pool::Main, way)
    };
    let [shm, tcp] = [Way::Shm, Way::Tcp].map(|way| at(Pool::Main, way));
    let durable = at(Pool::Durable, Way::Shm);
    let (get, put) = (What::Get(FOUR_KIB, 1), What::Put(FOUR_KIB, 1));
    let tiny = |batch| What::Put(few(SMALL, 40 * 1024), batch);
    let (p50, keys) = (Metric::P50, Metric::Keys);
    let most = Goal::RatioAtMost;
    let none = || Bound::None(NO_LIMIT);
    vec![
        case("shm/put/4KiB", shm, put, p50, ping(), most(3.0)),
        case("tcp/put/4KiB", tcp, put, p50, ping(), most(4.0)),
        case(
            "shm/put-durable/4KiB",
            durable,
            put,
            p50,
            Bound::FlushAnd("shm/put/4KiB".to_owned()),
            most(1.0),
        ),
        case("shm/get/4KiB", shm, get, p50, ping(), most(1.5)),
        case("tcp/get/4KiB", tcp, get, p50, ping(), most(2.5)),
        case(
            "shm/get-known/4KiB",
            known(Way::Shm),
            What::GetKnown(FOUR_KIB),
            p50,
            ping(),
            Goal::AtMost(5.0),
        ),
        case(
            "tcp/get-known/4KiB",
            known(Way::Tcp),
            What::GetKnown(FOUR_KIB),
            p50,
            ping(),
            NOT_ASKED,
        ),
        case("shm/put/64B", shm, tiny(1), p50, ping(), NOT_ASKED),
        case(
            "shm/put/1024x64B",
            shm,
            tiny(1024),
            keys,
            none(),
            Goal::AtLeast(0.5),
        ),
        case("shm/put/256x64B", shm, tiny(256), keys, none(), NOT_ASKED),
        case(
            "remove/256x64B",
            shm,
            What::Remove(few(SMALL, 4096), 256),
            keys,
            Bound::Case("shm/put/256x64B".to_owned()),
            Goal::RatioAtLeast(1.0),
        ),
        case("tcp/put/1024x64B", tcp, tiny(1024), keys, none(), NOT_ASKED),
        case(
            "shm/put-durable/1024x64B",
            durable,
            tiny(1024),
            keys,
            none(),
            NOT_ASKED,
        ),
    ]
}

fn first_writes() -> Vec<Case> {
    let blocks = span(MIB);
    let group = "first writes into a segment";
    let warm = Case {
        id: "shm/put/16x1MiB".to_owned(),
        group,
        place: at(Pool::Main, Way::Shm),
        what: What::Put(blocks, 16),
        metric: Metric::Rate,
        bound: moving(Way::Shm, blocks),
        goal: Goal::None("it is what first writes are compared with"),
    };
    let fresh = Case {
        id: "shm/put-fresh/16x1MiB".to_owned(),
        place: at(Pool::Fresh, Way::Shm),
        bound: Bound::Case(warm.id.clone()),
        goal: Goal::RatioAtLeast(0.9),
        ..warm.clone()
    };
    vec![warm, fresh]
}

/// A segment in the client's own process.
fn local() -> Vec<Case> {
    let place = at(Pool::Local, Way::Shm);
    let case = |id: &str, what, metric, bound| Case {
        id: format!("local/{id}"),
        group: "a segment of the client's own process",
        place,
        what,
        metric,
        bound,
        goal: NOT_ASKED,
    };
    let blocks = span(MIB);
    let copy = || moving(Way::Shm, blocks);
    let ping = || Bound::Bare(PING);
    vec![
        case("put/32x1MiB", What::Put(blocks, 32), Metric::Rate, copy()),
        case("get/32x1MiB", What::Get(blocks, 32), Metric::Rate, copy()),
        case("put/4KiB", What::Put(FOUR_KIB, 1), Metric::P50, ping()),
        case("get/4KiB", What::Get(FOUR_KIB, 1), Metric::P50, ping()),
    ]
}

fn keys() -> Vec<Case> {
    let place = at(Pool::Keys, Way::Shm);
    let case = |id: String, place, what, metric, bound, goal| Case {
        id,
        group: "exist and match_prefix, pool of 100,000 blocks",
        place,
        what,
        metric,
        bound,
        goal,
    };
    let mut table = vec![Case {
        id: "memory/master/100000".to_owned(),
        group: "memory",
        place,
        what: What::MasterMemory,
        metric: Metric::Bytes,
        bound: Bound::None(NO_LIMIT),
        goal: Goal::AtMost(160.0),
    }];
    // (keys, the goal as a ratio to a ping-pong, the goal in millions of keys a second)
    for (batch, latency, rate) in [
        (1, Some(1.15), None),
        (64, Some(1.25), None),
        (1024, None, Some(6.0)),
        (8192, None, Some(15.0)),
    ] {
        for lease in [true, false] {
            let suffix = if lease { "" } else { "/no-lease" };
            let (metric, bare) = match latency {
                Some(_) => (Metric::P50, PING),
                // The bytes that the request and its answer need at least.
                None => (Metric::Keys, payload(batch)),
            };
            let goal = match (lease, latency, rate) {
                (true, Some(ratio), _) => Goal::RatioAtMost(ratio),
                (true, None, Some(rate)) => Goal::AtLeast(rate),
                _ => NOT_ASKED,
            };
            table.push(case(
                format!("exist/{batch}{suffix}"),
                place,
                What::Exist { batch, lease },
                metric,
                Bound::Bare(bare),
                goal,
            ));
        }
    }
    for (batch, ratio) in [(1, 1.5), (64, 2.0)] {
        table.push(case(
            format!("exist-spinning/{batch}"),
            Place {
                spins: true,
                ..place
            },
            What::Exist { batch, lease: true },
            Metric::P50,
            Bound::Bare(SPINNING_PING),
            Goal::RatioAtMost(ratio),
        ));
    }
    for (blocks, goal) in [(64, NOT_ASKED), (1024, Goal::RatioAtMost(1.3))] {
        table.push(case(
            format!("match_prefix/{blocks}"),
            place,
            What::MatchPrefix(blocks),
            Metric::P50,
            Bound::Case(format!("exist/{blocks}")),
            goal,
        ));
    }
    let million = at(Pool::Million, Way::Shm);
    table.push(Case {
        group: "the same with 1,000,000 blocks",
        ..case(
            "exist/8192/1000000".to_owned(),
            million,
            What::Exist {
                batch: 8192,
                lease: true,
            },
            Metric::Keys,
            Bound::Case("exist/8192".to_owned()),
            Goal::RatioAtLeast(0.65),
        )
    });
    table.push(Case {
        id: "memory/master/1000000".to_owned(),
        group: "memory",
        place: million,
        what: What::MasterMemory,
        metric: Metric::Bytes,
        bound: Bound::None(NO_LIMIT),
        goal: Goal::AtMost(160.0),
    });
    table
}

fn memory() -> Vec<Case> {
    let case = |id: &str, way, what| Case {
        id: format!("memory/{id}"),
        group: "memory",
        place: at(Pool::Main, way),
        what,
        metric: Metric::Bytes,
        bound: Bound::None(NO_LIMIT),
        goal: NOT_ASKED,
    };
    vec![
        case("client-connection/shm", Way::Shm, What::ClientMemory),
        case("client-connection/tcp", Way::Tcp, What::ClientMemory),
        case("node", Way::Shm, What::NodeMemory),
    ]
}

/// A ping-pong with keys of 32 bytes in the request and one bit for each in the answer.
const fn payload(keys: u64) -> Bare {
    Bare::Ping {
        request: 32 * keys,
        answer: keys.div_ceil(8),
        spin: false,
        one_core: false,
    }
}
