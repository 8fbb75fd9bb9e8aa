//! What lies in wait for a moment: see [`crate::plan`]'s `ambush`. The network and the store tell of each message and
//! record; the world lets happen what is due.

use crate::dice::{Dice, Stream};
use crate::plan::{Ambush, Logged, Moment, Plan, Said, Trick};
use bytes::Bytes;
use kvpool_master::store::record::{self, Record};
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::unpack;
use kvpool_types::{Key, SegmentId};
use parking_lot::Mutex;
use prost::Message;
use proto::{master_message, node_message};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// Which block a message is about.
#[derive(Clone, Debug)]
pub(crate) enum About {
    /// A key of a namespace.
    Key(NamespaceId, Key),
    /// A key in the namespace of a client.
    KeyOf(usize, Key),
    /// The block with this version.
    Version(u64),
    /// It names none.
    Nothing,
}

/// Something that is due.
#[derive(Debug)]
pub(crate) struct Sprung {
    pub(crate) ambush: Ambush,
    pub(crate) about: About,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Ambushes {
    all: Vec<Ambush>,
    /// How often each may still happen.
    left: Mutex<Vec<u64>>,
    dice: Dice,
    sprung: mpsc::UnboundedSender<Sprung>,
    due: Mutex<Option<mpsc::UnboundedReceiver<Sprung>>>,
    is_over: AtomicBool,
    /// The versions of the blocks of orders to nodes, by the tickets that the answers name.
    transfers: Mutex<BTreeMap<u64, u64>>,
    /// The versions of blocks that were to come back from media.
    returns: Mutex<BTreeSet<u64>>,
    /// The versions of the blocks of pulls, by the tickets that the answers name.
    pulls: Mutex<BTreeMap<u64, u64>>,
}

/// The block of the first ticket of an answer.
fn first_of(done: &proto::TransfersDone, ordered: &Mutex<BTreeMap<u64, u64>>) -> About {
    let first = done.transfers.first();
    let version = first.and_then(|done| ordered.lock().get(&done.ticket).copied());
    version.map_or(About::Nothing, About::Version)
}

impl Ambushes {
    pub(crate) fn new(plan: &Plan) -> Self {
        let (sprung, due) = mpsc::unbounded_channel();
        Self {
            all: plan.ambushes.clone(),
            left: Mutex::new(plan.ambushes.iter().map(|ambush| ambush.times).collect()),
            dice: Dice::new(plan.seed, Stream::Moments),
            sprung,
            due: Mutex::new(Some(due)),
            is_over: AtomicBool::new(false),
            transfers: Mutex::default(),
            returns: Mutex::default(),
            pulls: Mutex::default(),
        }
    }

    /// Nothing happens any more.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// What is due, for one caller.
    pub(crate) fn due(&self) -> Option<mpsc::UnboundedReceiver<Sprung>> {
        self.due.lock().take()
    }

    /// A moment is there. Returns for how long its message waits.
    fn meet(&self, at: Moment, about: &About) -> Duration {
        let mut late = Duration::ZERO;
        if self.is_over.load(Ordering::Acquire) {
            return late;
        }
        for (ambush, left) in self.all.iter().zip(self.left.lock().iter_mut()) {
            if ambush.at != at || *left == 0 || !self.dice.chance(ambush.share) {
                continue;
            }
            *left -= 1;
            match ambush.trick {
                Trick::Late(ms) => late += Duration::from_millis(ms),
                // Nobody listens once the history has ended.
                _ => drop(self.sprung.send(Sprung {
                    ambush: *ambush,
                    about: about.clone(),
                })),
            }
        }
        late
    }

    /// A leader hands a group to the store.
    pub(crate) fn logs(&self, group: &Bytes) -> Duration {
        let mut late = Duration::ZERO;
        if !self.all.iter().any(|one| matches!(one.at, Moment::Logs(_))) {
            return late;
        }
        let Ok(decoded) = record::decode(group) else {
            return late;
        };
        for record in decoded.records {
            let (logged, about) = match record {
                Record::Commit(commit) => {
                    let mut places = commit.replicas.iter();
                    let is_copy = places.any(|(segment, _)| segment.is_on_medium());
                    let logged = if is_copy { Logged::Copy } else { Logged::Block };
                    let about = About::Key(commit.namespace, commit.key);
                    if !is_copy && self.returns.lock().contains(&commit.version.0) {
                        late += self.meet(Moment::Logs(Logged::Return), &about);
                    }
                    (logged, about)
                }
                Record::Remove(gone) => {
                    let is_whole = gone.places.is_empty();
                    let logged = if is_whole {
                        Logged::Removal
                    } else {
                        Logged::Leaving
                    };
                    (logged, About::Key(gone.namespace, gone.key))
                }
                Record::ReplicaGone(gone) => {
                    (Logged::ReplicaGone, About::Key(gone.namespace, gone.key))
                }
                Record::ReplicaAdded(added) => {
                    (Logged::ReplicaAdded, About::Key(added.namespace, added.key))
                }
                Record::SegmentGone(_) | Record::IncarnationDropped(_) => {
                    (Logged::NodeGone, About::Nothing)
                }
                Record::Medium(_) => (Logged::Medium, About::Nothing),
                Record::LeasedRanges(_) | Record::UnleasedRanges(_) => {
                    (Logged::Leases, About::Nothing)
                }
                _ => continue,
            };
            late += self.meet(Moment::Logs(logged), &about);
        }
        late
    }

    /// A node says something to its master.
    pub(crate) fn hears(&self, message: &proto::NodeMessage) -> Duration {
        use node_message::Body;
        let (said, about) = match &message.body {
            Some(Body::Register(_)) => (Said::Register, About::Nothing),
            Some(Body::Fenced(_)) => (Said::Fenced, About::Nothing),
            Some(Body::Draining(_)) => (Said::Draining, About::Nothing),
            Some(Body::Media(_)) => (Said::Media, About::Nothing),
            Some(Body::MediumAttached(_)) => (Said::MediumAttached, About::Nothing),
            Some(Body::TransfersDone(done)) => {
                (Said::TransfersDone, first_of(done, &self.transfers))
            }
            Some(Body::Pulled(done)) => (Said::Pulled, first_of(done, &self.pulls)),
            _ => return Duration::ZERO,
        };
        self.meet(Moment::Says(said), &about)
    }

    /// A candidate has lost. Returns for how long its watch of the leader shows it nothing new.
    pub(crate) fn loses(&self) -> Duration {
        self.meet(Moment::Loses, &About::Nothing)
    }

    /// A master says something to a node.
    pub(crate) fn orders(&self, message: &proto::MasterMessage) -> Duration {
        use master_message::Body;
        let version = |version: Option<u64>| version.map_or(About::Nothing, About::Version);
        let (said, about) = match &message.body {
            Some(Body::Transfers(orders)) => {
                let all = orders.transfers.iter();
                let versions = all.map(|order| (order.ticket, order.version));
                self.transfers.lock().extend(versions);
                let reads_medium = |order: &&proto::Transfer| {
                    let from = order.from.as_ref();
                    from.is_some_and(|from| SegmentId(from.segment).is_on_medium())
                };
                let returns = orders.transfers.iter().filter(reads_medium);
                self.returns
                    .lock()
                    .extend(returns.map(|order| order.version));
                let first = orders.transfers.first();
                (Said::Transfers, version(first.map(|order| order.version)))
            }
            Some(Body::Pulls(orders)) => {
                let all = orders.pulls.iter();
                let versions = all.map(|order| (order.ticket, order.version));
                self.pulls.lock().extend(versions);
                let first = orders.pulls.first();
                (Said::Pulls, version(first.map(|order| order.version)))
            }
            Some(Body::Fence(_)) => (Said::Fence, About::Nothing),
            Some(Body::AttachMedium(_)) => (Said::AttachMedium, About::Nothing),
            Some(Body::Demoted(_)) => (Said::Demoted, About::Nothing),
            _ => return Duration::ZERO,
        };
        self.meet(Moment::Says(said), &about)
    }

    /// A client's call reaches a master.
    pub(crate) fn asks(&self, client: usize, method: &'static str, request: &Bytes) -> Duration {
        let at = Moment::Asks(method);
        if !self.all.iter().any(|one| one.at == at) {
            return Duration::ZERO;
        }
        let keys = match method {
            "Lookup" => keys_of(request, |asked: proto::LookupRequest| asked.keys),
            "Renew" => keys_of(request, |asked: proto::RenewRequest| asked.keys),
            "Reserve" => keys_of(request, |asked: proto::ReserveRequest| asked.keys),
            "Commit" => keys_of(request, |asked: proto::CommitRequest| asked.keys),
            _ => None,
        };
        let about = keys.map_or(About::Nothing, |key| About::KeyOf(client, key));
        self.meet(at, &about)
    }
}

/// The first key of a request.
fn keys_of<R: Message + Default>(request: &Bytes, keys: impl Fn(R) -> Bytes) -> Option<Key> {
    let keys = keys(R::decode(request.clone()).ok()?);
    let first = unpack(&keys).flatten().next();
    first.map(|key| key.to_key())
}
