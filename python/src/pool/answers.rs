//! The master's answers about blocks, nodes and the pool, as Python objects.

use kvpool_client::{
    DescribedReplica, Description as Described, Limits as Agreed, Listed as InList, NodeStats,
    PoolStats, SegmentStats,
};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// The master's description of one block.
///
/// `length`: bytes. `checksum`: the CRC-64 of the block's bytes. `version`: grows with each put of the key.
/// `replicas`: list of `Replica`, in memory and on SSDs. `lease_left`, `soft_pin_left`: seconds, 0 without a
/// lease or soft pin. `hard_pin`: whether the block is never evicted.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Description {
    length: u64,
    checksum: u64,
    version: u64,
    replicas: Vec<Py<Replica>>,
    lease_left: f64,
    soft_pin_left: f64,
    hard_pin: bool,
}

/// One replica of a block. `node`: name of the store node. `segment`: id of the segment. `offset`: bytes from
/// the segment's start. `state` of a replica in memory: the state of its node (live, suspect, draining or
/// drained), or hidden while the replica is verified again. `state` of a copy on an SSD: the state of its
/// medium (ready, read_only, slow, gone, attaching, absent or refused).
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Replica {
    node: String,
    segment: u32,
    offset: u64,
    state: String,
}

/// One block of a listing. `key`: as text. `length`: bytes. `replicas`: their number. `leased`, `pinned`:
/// whether a lease or a pin protects the block.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Listed {
    key: String,
    length: u64,
    replicas: u32,
    leased: bool,
    pinned: bool,
}

/// The pool's limits. `max_block`: the largest block, in bytes. `max_batch_keys`: the most keys in one message;
/// the client splits larger batches. `lease_ttl`: how long the master leases found blocks, in seconds.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Limits {
    max_block: u64,
    max_batch_keys: usize,
    lease_ttl: f64,
}

/// The master's counts. `epoch`: the term. `blocks`: the visible blocks. `reservations`: the puts that have not
/// ended.
///
/// `capacity`: bytes of memory that the store nodes contribute. `used`: bytes of blocks, open puts and quarantine.
/// `quarantine`: bytes of removed blocks that cannot be given out yet. `nodes`: list of `Node`. `uptime`: seconds.
/// `counters`: the master's counters by name. `namespaces`: the names of the known namespaces.
/// With tokens, the roles reader and writer see only the term, the uptime and their namespaces. The rest is 0
/// or empty.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Stats {
    epoch: u64,
    blocks: u64,
    reservations: u64,
    capacity: u64,
    used: u64,
    quarantine: u64,
    nodes: Vec<Py<Node>>,
    counters: BTreeMap<String, u64>,
    uptime: f64,
    namespaces: Vec<String>,
}

/// A store node. `state`: live, suspect, draining or drained (it may stop). `incarnation`: text, new after each
/// restart of the node. `data_address`: the data port, host:port. `heartbeat_age`: seconds since the last
/// heartbeat. `segments`: list of `Segment`. `version`: of kvpool; empty if unknown.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Node {
    name: String,
    state: String,
    incarnation: String,
    data_address: String,
    heartbeat_age: f64,
    segments: Vec<Py<Segment>>,
    version: String,
}

/// A segment of a store node. `id`: int. `capacity`, `used`, `quarantine`, `largest_free`: bytes. `free_ranges`: the
/// number of separate free ranges.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct Segment {
    id: u32,
    capacity: u64,
    used: u64,
    quarantine: u64,
    free_ranges: u64,
    largest_free: u64,
}

/// Gives the classes a `repr` of their main fields.
macro_rules! shown {
    ($($class:ident: $($field:ident),+;)*) => {
        $(
            #[pymethods]
            impl $class {
                fn __repr__(&self) -> String {
                    let fields = [$(format!(concat!(stringify!($field), "={:?}"), self.$field)),+];
                    format!(concat!(stringify!($class), "({})"), fields.join(", "))
                }
            }
        )*
    };
}

pub(super) use shown;

shown! {
    Description: length, version, lease_left, soft_pin_left, hard_pin;
    Replica: node, segment, offset, state;
    Listed: key, length, replicas, leased, pinned;
    Limits: max_block, max_batch_keys, lease_ttl;
    Stats: epoch, blocks, capacity, used, quarantine;
    Node: name, state, data_address, heartbeat_age;
    Segment: id, capacity, used, quarantine;
}

impl Description {
    pub(crate) fn new(py: Python<'_>, described: Described) -> PyResult<Self> {
        Ok(Self {
            length: described.length.0,
            checksum: described.checksum.0,
            version: described.version.0,
            replicas: objects(py, described.replicas)?,
            lease_left: described.lease_left.as_secs_f64(),
            soft_pin_left: described.soft_pin_left.as_secs_f64(),
            hard_pin: described.hard_pin,
        })
    }
}

impl Stats {
    pub(crate) fn new(py: Python<'_>, stats: PoolStats) -> PyResult<Self> {
        let nodes = stats.nodes.into_iter().map(|node| Node::new(py, node));
        let nodes = nodes.map(|node| node.and_then(|node| Py::new(py, node)));
        Ok(Self {
            epoch: stats.epoch.0,
            blocks: stats.blocks,
            reservations: stats.reservations,
            capacity: stats.capacity.0,
            used: stats.used.0,
            quarantine: stats.quarantine.0,
            nodes: nodes.collect::<PyResult<_>>()?,
            counters: stats.counters,
            uptime: stats.uptime.as_secs_f64(),
            namespaces: stats.namespaces,
        })
    }
}

impl Node {
    fn new(py: Python<'_>, node: NodeStats) -> PyResult<Self> {
        Ok(Self {
            name: node.name,
            state: node.state,
            incarnation: node.incarnation.to_string(),
            data_address: node.data_address,
            heartbeat_age: node.heartbeat_age.as_secs_f64(),
            segments: objects(py, node.segments)?,
            version: node.version,
        })
    }
}

/// Converts items to Python objects.
fn objects<T, U>(py: Python<'_>, items: Vec<T>) -> PyResult<Vec<Py<U>>>
where
    U: From<T> + pyo3::PyClass + Into<pyo3::PyClassInitializer<U>>,
{
    items
        .into_iter()
        .map(|item| Py::new(py, U::from(item)))
        .collect()
}

impl From<DescribedReplica> for Replica {
    fn from(replica: DescribedReplica) -> Self {
        Self {
            node: replica.node,
            segment: replica.extent.segment.0,
            offset: replica.extent.offset.0,
            state: replica.state,
        }
    }
}

impl From<InList> for Listed {
    fn from(listed: InList) -> Self {
        Self {
            key: listed.key,
            length: listed.length.0,
            replicas: listed.replicas,
            leased: listed.leased,
            pinned: listed.pinned,
        }
    }
}

impl From<Agreed> for Limits {
    fn from(limits: Agreed) -> Self {
        Self {
            max_block: limits.max_block.0,
            max_batch_keys: limits.max_batch_keys,
            lease_ttl: limits.lease_ttl.as_secs_f64(),
        }
    }
}

impl From<SegmentStats> for Segment {
    fn from(segment: SegmentStats) -> Self {
        Self {
            id: segment.id.0,
            capacity: segment.capacity.0,
            used: segment.used.0,
            quarantine: segment.quarantine.0,
            free_ranges: segment.free_ranges,
            largest_free: segment.largest_free.0,
        }
    }
}
