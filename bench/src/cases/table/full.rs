//! The cases of a full pool, the usual state of a cache.

use super::{FOUR_KIB, KIB, MIB, at, size, span};
use crate::agent::protocol::Way;
use crate::cases::{Bound, Case, Goal, Metric, Pool, What};

const GROUP: &str = "a full pool";
const WITH_ROOM: Goal = Goal::None("it is what the same in a full pool is compared with");
const OF_ITSELF: &str = "it is compared with itself";

pub(super) fn cases() -> Vec<Case> {
    let mut table = Vec::new();
    for (count, bytes) in [(32, MIB), (128, 256 * KIB)] {
        let blocks = span(bytes);
        let shape = format!("{count}x{}", size(bytes));
        table.push(Case {
            id: format!("full/put/{shape}"),
            group: GROUP,
            place: at(Pool::Full, Way::Shm),
            what: What::Put(blocks, count),
            metric: Metric::Rate,
            bound: Bound::Case(format!("shm/put/{shape}")),
            goal: Goal::RatioAtLeast(0.9),
        });
        let read = |pool, id: String, bound, goal| Case {
            id,
            group: GROUP,
            place: at(pool, Way::Shm),
            what: What::PutRead(blocks, count),
            metric: Metric::Rate,
            bound,
            goal,
        };
        let with_room = format!("with-room/put-beside-gets/{shape}");
        table.push(read(
            Pool::Main,
            with_room.clone(),
            Bound::None("no plain code does the same"),
            WITH_ROOM,
        ));
        table.push(read(
            Pool::Full,
            format!("full/put-beside-gets/{shape}"),
            Bound::Case(with_room),
            Goal::RatioAtLeast(0.9),
        ));
    }
    for blocks in [FOUR_KIB, span(MIB)] {
        table.push(Case {
            id: format!("full/put-tail/{}", size(blocks.bytes)),
            group: GROUP,
            place: at(Pool::Full, Way::Shm),
            what: What::Put(blocks, 1),
            metric: Metric::Tail,
            bound: Bound::None(OF_ITSELF),
            goal: Goal::AtMost(3.0),
        });
    }
    let scenario = |id: &str, pool, what, metric, goal| Case {
        id: format!("full/{id}"),
        group: GROUP,
        place: at(pool, Way::Shm),
        what,
        metric,
        bound: Bound::None(OF_ITSELF),
        goal: Goal::AtMost(goal),
    };
    table.extend([
        scenario(
            "crowd-wait",
            Pool::Crowded,
            What::CrowdWait,
            Metric::Seconds,
            1.0,
        ),
        scenario(
            "crowd-evicted",
            Pool::Crowded,
            What::CrowdEvicted,
            Metric::Times,
            1.0,
        ),
        scenario(
            "restart",
            Pool::Restarted,
            What::Restart,
            Metric::Seconds,
            1.0,
        ),
        scenario(
            "node-loss",
            Pool::NodeLost,
            What::NodeLoss,
            Metric::Times,
            1.5,
        ),
    ]);
    table
}
