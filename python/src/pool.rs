//! `kvpool.Pool`: the pool as Python programs use it.
//!
//! Calls read their arguments with the interpreter's lock held, and run the client without it. An argument of a
//! wrong type raises an exception before any work. A wrong value fails only its own key.

mod answers;
mod buffers;
mod lease;
mod listing;
mod namespaces;
mod open;
mod options;
mod outcomes;
mod registration;
mod replicas;

use crate::errors::Fault;
use crate::home::Resident;
use crate::interrupts;
use crate::keys::{
    Namespace, for_each, length_hint, list_of_alike, pack_keys, read_key, read_keys,
};
use crate::loan::{Loan, deadline, left};
use crate::places::{Placed, by_place, put_by_place};
use crate::view::View;
pub(crate) use answers::{Description, Limits, Listed, Node, Replica, Segment, Stats};
use buffers::{Block, Buffers, Unwritten, Use};
use kvpool_client::blocking::Client;
use kvpool_client::{
    ClientFiles, GetBlock, GetOptions, GetOutcome, Leasing, PackedKeys, PutBlock, PutOptions,
    PutOutcome, Remove, Slice, ViewOptions,
};
use kvpool_types::{Code, Key, Length, Offset};
pub(crate) use lease::{Lease, Prefix};
pub(crate) use listing::Listing;
pub(crate) use namespaces::NamespaceInfo;
use open::{Connection, OpenHold};
use options::{ConnectTimes, Names, PutWords, connect_options, some_seconds};
pub(crate) use options::{Int, Whole, seconds};
use outcomes::{Planned, answers, finish, merge, only, plan_one, read_parents, truth, uneven};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
pub(crate) use registration::Registration;
pub(crate) use replicas::{ReplicaTask, change_name, state_name};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A connection to the pool. All threads of a process can share it.
///
/// `Pool.connect` makes it; `close()` or a `with` statement closes it.
///
/// Keys: a str of 1 byte to 1 KiB in UTF-8, or the 32 bytes of a digest (see `chain_keys`).
///
/// Blocks: one buffer, or a sequence of buffers that hold the block's bytes in order. A buffer is one of:
///
/// - an object with the buffer protocol (bytes, bytearray, memoryview, array, numpy), contiguous, and
///   writable for gets;
/// - a contiguous torch tensor on the CPU or a CUDA device;
/// - an array with `__cuda_array_interface__`;
/// - an `(address, length)` pair of ints, whose memory the caller keeps alive.
///
/// No transfer touches a buffer after its call has returned. If a transfer still uses the memory 10 seconds after
/// the call's timeout, the call raises MemoryInUseError. Bytes move without a further copy, except that a GPU's
/// bytes pass through pinned host memory.
///
/// Streams: for GPU memory a call waits for the work that torch's current stream, or the stream that an array
/// names, has queued. These waits do not end by the timeout. The copies begin after the work of the default
/// stream. An `(address, length)` pair names no stream: work on it in other streams must have ended. Work that
/// is queued after the call sees the bytes. Pinned host memory is host memory: work on it must have ended.
///
/// Batches: one result for each key, in order. A failed key has an Error in its place; the other keys are
/// not affected. A wrong type raises TypeError before anything is done. Lists of different lengths, and options
/// out of range, raise InvalidArgumentError before anything is done. A key named twice is served twice.
///
/// Time: all times are in seconds, from 0 to 1,000,000. Every call that waits releases the interpreter's lock and
/// ends by its timeout. On the main thread it runs signal handlers meanwhile. An exception from a handler, such as
/// KeyboardInterrupt, ends the call, and a put may then be stored or not. With GPU memory, handlers run at
/// the end of the call.
///
/// Lifetime: a closed pool raises ClosedError. After a fork, the parent's pools raise ForkedError in the
/// child. A child whose parent had pools open at the fork cannot connect either. Connect only after the
/// fork, or start processes by spawn.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct Pool {
    connection: Arc<Connection>,
    masters: String,
}

impl Pool {
    fn open(&self) -> Result<OpenHold, Fault> {
        self.connection.get()
    }

    /// Runs `work` with the client, without the interpreter's lock.
    fn call<T: Send, E: Into<Fault> + Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Client) -> Result<T, E> + Send,
    ) -> Result<T, Fault> {
        py.detach(|| {
            let open = self.open()?;
            work(&open.get()?.client).map_err(Into::into)
        })
    }

    fn packer(&self) -> Result<PackedKeys, Fault> {
        Ok(self.open()?.get()?.client.packer())
    }

    fn put_blocks<'py>(
        &self,
        keys: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        parents: Option<&Bound<'py, PyAny>>,
        words: PutWords,
    ) -> PyResult<Vec<Result<PutOutcome, Fault>>> {
        let py = keys.py();
        let open = self.open()?;
        let open = open.get()?;
        let options = words.read()?;
        let mut read = Vec::with_capacity(length_hint(keys));
        for_each(keys, "keys", |key| {
            read.push(read_key(key)?);
            Ok(())
        })?;
        let mut parents = match parents {
            Some(parents) => read_parents(parents, read.len())?,
            None => Vec::new(),
        }
        .into_iter();
        let mut buffers = Buffers::new(py, open, Use::Read);
        let mut keys = read.into_iter();
        let (mut plan, mut puts): (Vec<Planned>, _) = (Vec::new(), Vec::new());
        for_each(blocks, "blocks", |block| {
            let Some(key) = keys.next() else {
                return Err(uneven("blocks"));
            };
            let lent = buffers.lend(block)?;
            let parent = parents.next().unwrap_or(Ok(None));
            let put = || {
                let (key, parent) = (key?, parent.map_err(|fault| fault.at("its parent"))?);
                Ok::<_, Fault>(match lent? {
                    Block::Host(buffers) => Placed::Host(PutBlock {
                        key,
                        parent,
                        buffers,
                    }),
                    Block::Device(buffers) => Placed::Device(PutBlock {
                        key,
                        parent,
                        buffers,
                    }),
                })
            };
            plan_one(put(), &mut plan, &mut puts);
            Ok(())
        })?;
        if keys.next().is_some() {
            return Err(uneven("blocks"));
        }
        let client = &open.client;
        let outcomes = buffers.run(options.timeout, |deadline| {
            let within = || PutOptions {
                timeout: Some(left(deadline)),
                ..options.clone()
            };
            put_by_place(
                puts,
                |puts| client.batch_put(puts, &within()),
                |puts| client.batch_put_gpu(puts, &within()),
            )
        })?;
        Ok(merge(plan, outcomes))
    }
}

const fn leasing(lease: bool) -> Leasing {
    if lease { Leasing::Lease } else { Leasing::None }
}

#[pymethods]
impl Pool {
    /// Connects to the pool.
    ///
    /// `master`: `host:port`, `http://host:port` or `https://host:port`, or `etcd://host:port/cluster`. Give
    /// several masters as a text with commas or as a sequence. Any master of the pool is enough: the client
    /// finds and follows the leader. Default: the environment variable KVPOOL_MASTER, else
    /// `http://127.0.0.1:7070`.
    /// `namespace`: clients with equal names of namespaces share blocks; registered at connect.
    /// `transport`: "shm", "rdma" or "tcp" forces one transport. "auto" uses shared memory to nodes on the same
    /// host, else RDMA, else TCP.
    /// `token_file`: the file with the token, for a pool that requires one. The client reads the file again
    /// when it changes. Default: the environment variable KVPOOL_TOKEN_FILE. `token`: the token itself, instead
    /// of a file.
    /// `timeout`: the longest time for connecting, in seconds.
    /// `put_timeout`, `get_timeout`, `control_timeout`: timeouts in seconds of calls without a `timeout`
    /// argument. Defaults: put 10, get 5, all other calls 3.
    /// `spin`: seconds for which a call polls for the master's answer before it sleeps. Polling takes a
    /// whole core, so use it only where cores are idle.
    /// `tls_ca`, `tls_cert`, `tls_key`: PEM files. The authority verifies masters and nodes at https:// and
    /// tls:// addresses. The client presents the certificate and its key to them. Defaults: the environment
    /// variables KVPOOL_TLS_CA, KVPOOL_TLS_CERT, KVPOOL_TLS_KEY.
    /// `tls_server_name`: the name that every certificate must have, instead of the host in the address.
    /// Default: KVPOOL_TLS_SERVER_NAME.
    ///
    /// Raises ConnectError when no master accepts the client. Raises InvalidArgumentError for a malformed
    /// address, an option out of range, TLS files that cannot be used, and "rdma" on a host without RDMA.
    #[staticmethod]
    #[pyo3(signature = (master=None, *, namespace=None, transport="auto", token=String::new(),
        token_file=None, timeout=5.0, put_timeout=None, get_timeout=None, control_timeout=None, spin=0.0, tls_ca=None,
        tls_cert=None, tls_key=None, tls_server_name=None))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn connect(
        py: Python<'_>,
        master: Option<&Bound<'_, PyAny>>,
        namespace: Option<&Namespace>,
        transport: &str,
        token: String,
        token_file: Option<PathBuf>,
        timeout: f64,
        put_timeout: Option<f64>,
        get_timeout: Option<f64>,
        control_timeout: Option<f64>,
        spin: f64,
        tls_ca: Option<PathBuf>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        tls_server_name: Option<String>,
    ) -> PyResult<Self> {
        let times = ConnectTimes {
            connect: timeout,
            put: put_timeout,
            get: get_timeout,
            control: control_timeout,
            spin,
        };
        let named = ClientFiles::from_environment();
        let tls = ClientFiles {
            ca: tls_ca.or(named.ca),
            cert: tls_cert.or(named.cert),
            key: tls_key.or(named.key),
            server_name: tls_server_name.or(named.server_name),
            min_version: named.min_version,
            problem: named.problem,
        };
        let options =
            connect_options(master, namespace, transport, token, token_file, tls, &times)?;
        let masters = options.masters.join(",");
        let resident = Resident::new()?;
        let client = py.detach(|| {
            Client::connect_with(options, interrupts::cancel_check()).map_err(Fault::from)
        })?;
        Ok(Self {
            connection: Arc::new(Connection::new(client, resident)),
            masters,
        })
    }

    /// Puts blocks, one for each key. Returns one result for each key:
    ///
    /// - True: the block is stored;
    /// - False: the key was present, and its block is unchanged;
    /// - an Error: the put failed.
    ///
    /// `parents`: for each key the key before it in its chain, or None. The master links a block to its parent
    /// if the parent is present at commit.
    /// `replicas`: the number of replicas, 1 to 64, each on another node. With too few nodes there are fewer
    /// replicas; `describe` shows them.
    /// `preferred_node`: the name of the node to try first, or several names in order. `prefer_same_host`: try
    /// nodes on this host next.
    /// `soft_pin`: seconds for which the blocks are evicted after all others. `hard_pin`: never evict the
    /// blocks.
    /// `upsert`: write a new version of blocks that are present; the result is True. Of several blocks with one
    /// key the last is written.
    /// `timeout`: seconds for the whole call, including the wait for room in a full pool.
    #[pyo3(signature = (keys, blocks, *, parents=None, replicas=Whole::ONE, preferred_node=None,
        prefer_same_host=false, soft_pin=None, hard_pin=false, upsert=false, timeout=None))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn batch_put<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        parents: Option<&Bound<'py, PyAny>>,
        replicas: Whole,
        preferred_node: Option<Names>,
        prefer_same_host: bool,
        soft_pin: Option<f64>,
        hard_pin: bool,
        upsert: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let words = PutWords {
            replicas,
            preferred_node,
            prefer_same_host,
            soft_pin,
            hard_pin,
            upsert,
            timeout,
        };
        let outcomes = self.put_blocks(keys, blocks, parents, words)?;
        answers(py, outcomes, |put| {
            Ok(truth(py, matches!(put, PutOutcome::Stored { .. })))
        })
    }

    /// Puts one block, as `batch_put` does. Returns True if the block is stored, False if the key was present.
    /// Raises an Error if the put failed, for example FullError when no room came free within the timeout.
    #[pyo3(signature = (key, block, *, parent=None, replicas=Whole::ONE, preferred_node=None,
        prefer_same_host=false, soft_pin=None, hard_pin=false, upsert=false, timeout=None))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn put<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        block: &Bound<'py, PyAny>,
        parent: Option<&Bound<'py, PyAny>>,
        replicas: Whole,
        preferred_node: Option<Names>,
        prefer_same_host: bool,
        soft_pin: Option<f64>,
        hard_pin: bool,
        upsert: bool,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        let words = PutWords {
            replicas,
            preferred_node,
            prefer_same_host,
            soft_pin,
            hard_pin,
            upsert,
            timeout,
        };
        let one = |item: &Bound<'py, PyAny>| PyTuple::new(py, [item]).map(Bound::into_any);
        let parents = parent.map(one).transpose()?;
        let outcomes = self.put_blocks(&one(key)?, &one(block)?, parents.as_ref(), words)?;
        Ok(matches!(only(outcomes)?, PutOutcome::Stored { .. }))
    }

    /// Gets blocks, each into the memory at its index in `into`. Returns one result for each key:
    ///
    /// - the block's length in bytes;
    /// - None: a miss, the pool does not have the block;
    /// - an Error: the get failed.
    ///
    /// The memory must be at least as long as the block; bytes after the block's end do not change. The bytes
    /// are verified against the checksum of the writer. Without a hit the content of the memory is undefined.
    /// The buffers of one block must not overlap. If those of different blocks do, the shared bytes are undefined.
    ///
    /// `timeout`: seconds for the whole call.
    /// `release`: wait until the master has ended the call's leases, and cache no locations. Otherwise the
    /// leases end shortly after the call.
    #[pyo3(signature = (keys, into, *, timeout=None, release=false))]
    fn batch_get<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        into: &Bound<'py, PyAny>,
        timeout: Option<f64>,
        release: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let open = self.open()?;
        let open = open.get()?;
        let options = GetOptions {
            timeout: some_seconds("timeout", timeout)?,
            release,
        };
        let mut read = Vec::with_capacity(length_hint(keys));
        for_each(keys, "keys", |key| {
            read.push(read_key(key)?);
            Ok(())
        })?;
        let mut buffers = Buffers::new(py, open, Use::Write);
        let mut keys = read.into_iter();
        let (mut plan, mut gets): (Vec<Planned>, _) = (Vec::new(), Vec::new());
        for_each(into, "into", |target| {
            let Some(key) = keys.next() else {
                return Err(uneven("targets"));
            };
            let lent = buffers.lend(target)?;
            let get = key.and_then(|key| {
                Ok(match lent? {
                    Block::Host(buffers) => Placed::Host(GetBlock { key, buffers }),
                    Block::Device(buffers) => Placed::Device(GetBlock { key, buffers }),
                })
            });
            plan_one(get, &mut plan, &mut gets);
            Ok(())
        })?;
        if keys.next().is_some() {
            return Err(uneven("targets"));
        }
        let client = &open.client;
        let outcomes = buffers.run(options.timeout, |deadline| {
            let within = || GetOptions {
                timeout: Some(left(deadline)),
                ..options
            };
            by_place(
                gets,
                |gets| client.batch_get(gets, &within()),
                |gets| client.batch_get_gpu(gets, &within()),
            )
        })?;
        answers(py, merge(plan, outcomes), |found| match found {
            GetOutcome::Hit { length, .. } => Ok(length.0.into_pyobject(py)?.into_any()),
            GetOutcome::Miss => Ok(py.None().into_bound(py)),
        })
    }

    /// Gets one block as bytes; None for a miss. Raises InvalidArgumentError for an invalid key, and an Error if the
    /// get failed.
    #[pyo3(signature = (key, *, timeout=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let timeout = some_seconds("timeout", timeout)?;
        let key = read_key(key)??;
        let open = self.open()?;
        let client = &open.get()?.client;
        let loan = Loan::new();
        let mut bytes = Vec::new();
        let mut failure = None;
        let place = |length: Length| -> Option<Slice> {
            // This runs outside the client's runtime, so that waiting for the interpreter does not stop calls
            // of other threads.
            Python::attach(|py| {
                let lent = Unwritten::new(py, length)
                    .map(|room| room.lend(py, &loan).inspect(|_| bytes.push(room)));
                lent.unwrap_or_else(|error| {
                    failure = Some(error);
                    None
                })
            })
        };
        let deadline = deadline(timeout.unwrap_or(client.timeouts().get));
        let found = py.detach(|| client.get_placed(&key, timeout, place));
        finish(
            py,
            (loan, deadline),
            found.map_err(Fault::from),
            bytes,
            failure,
        )
    }

    /// Gets `length` bytes of a block, starting at byte `offset`; None for a miss. Moves and verifies only the
    /// 64 KiB chunks of the range. Raises InvalidArgumentError for a range outside the block, and an Error if
    /// the get failed.
    #[pyo3(signature = (key, offset, length, *, timeout=None))]
    fn get_range<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        offset: Whole,
        length: Whole,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (offset, length) = (offset.read("offset")?, length.read("length")?);
        let options = GetOptions {
            timeout: some_seconds("timeout", timeout)?,
            release: false,
        };
        let key = read_key(key)??;
        let open = self.open()?;
        let client = &open.get()?.client;
        let limit = client.limits().max_block;
        if length > limit.0 {
            let message =
                format!("a block of {length} bytes exceeds the pool's limit of {limit} bytes");
            return Err(Fault::invalid(message).into());
        }
        let room = Unwritten::new(py, Length(length))?;
        let loan = Loan::new();
        let buffers: Vec<Slice> = room.lend(py, &loan).into_iter().collect();
        let deadline = deadline(options.timeout.unwrap_or(client.timeouts().get));
        let found = py.detach(|| client.get_range(&key, Offset(offset), buffers, &options));
        // A hit has the length of the block, not of the range.
        let found = found.map(|found| match found {
            GetOutcome::Hit { version, .. } => GetOutcome::Hit {
                length: Length(length),
                version,
            },
            GetOutcome::Miss => GetOutcome::Miss,
        });
        finish(
            py,
            (loan, deadline),
            found.map_err(Fault::from),
            vec![room],
            None,
        )
    }

    /// Returns one bool for each key, in order: whether the pool has the block. Found blocks are leased
    /// (`limits.lease_ttl` seconds at most) and count as used; with `lease=False` neither happens.
    /// Raises InvalidArgumentError for an invalid key, and an Error when the master cannot be asked.
    #[pyo3(signature = (keys, *, lease=true))]
    fn is_exist<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = pack_keys(keys, self.packer()?)?;
        let (present, _) = self.call(py, |client| client.exist_packed(keys, leasing(lease)))?;
        list_of_alike(py, &present)
    }

    /// Returns a `Prefix`: the number of leading blocks of a chain that the pool has, with a lease on them.
    /// Takes one round trip. With `lease=False` nothing is leased. Raises as `is_exist` does.
    #[pyo3(signature = (keys, *, lease=true))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        lease: bool,
    ) -> PyResult<Prefix> {
        let keys = pack_keys(keys, self.packer()?)?;
        let prefix = self.call(py, |client| {
            client.match_prefix_packed(keys, leasing(lease))
        })?;
        Prefix::new(py, Arc::clone(&self.connection), prefix)
    }

    /// Returns a block in place, without a copy, from a replica in shared memory on this host; None for a miss.
    /// `verify=False` skips the comparison with the checksum. Raises an Error if the call failed, or if no
    /// replica of the block is in shared memory on this host.
    #[pyo3(signature = (key, *, verify=true, timeout=None))]
    fn get_view(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        verify: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<View>> {
        let options = ViewOptions {
            timeout: some_seconds("timeout", timeout)?,
            unverified: !verify,
        };
        let key = read_key(key)??;
        let view = self.call(py, |client| client.get_view(&key, &options))?;
        Ok(view.map(View::new))
    }

    /// Registers memory with the RDMA ports of this host, for buffers of repeated puts and gets.
    /// `memory`: a writable buffer, a tensor, an array with `__cuda_array_interface__`, or an `(address, length)` pair.
    /// Without RDMA this has no effect. Raises InvalidArgumentError for memory that cannot be registered or is already
    /// registered, and TypeError for another object.
    fn register_buffer(&self, memory: &Bound<'_, PyAny>) -> PyResult<Registration> {
        Registration::new(self.open()?, memory)
    }

    /// Removes blocks. Returns one result for each key:
    ///
    /// - True: the block is removed;
    /// - False: the block was absent;
    /// - an Error: the block was kept, for example LeasedError when a lease or a pin protects it.
    ///
    /// `force` removes leased and pinned blocks too. If the master's answer is lost, the block may be present
    /// or not. The client does not repeat a removal, because the repetition could remove a newer block. Raises
    /// an Error when the master answers for no key at all.
    #[pyo3(signature = (keys, *, force=false))]
    fn remove<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        force: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let (mut plan, mut asked): (Vec<Planned>, Vec<Key>) = (Vec::new(), Vec::new());
        for_each(keys, "keys", |key| {
            plan_one(read_key(key)?, &mut plan, &mut asked);
            Ok(())
        })?;
        let removed = self.call(py, |client| client.remove(Remove::Keys(asked), force))?;
        let outcomes = removed.codes.into_iter().map(|code| match code {
            Code::Ok => Ok(true),
            Code::Missing => Ok(false),
            Code::Leased => Err(Fault::new(code, "a lease or a pin protects the block")),
            other => Err(Fault::new(
                other,
                "no answer: the block may be removed or not",
            )),
        });
        let outcomes = merge(plan, outcomes.collect());
        answers(py, outcomes, |removed| Ok(truth(py, removed)))
    }

    /// Removes every block of the namespace whose key matches a regular expression. Returns `(removed, kept)`.
    /// Without `force`, leased and pinned blocks are kept. Raises InvalidArgumentError for an invalid
    /// expression, and an Error when the master cannot be asked.
    #[pyo3(signature = (regex, *, force=false))]
    fn remove_matching(&self, py: Python<'_>, regex: String, force: bool) -> PyResult<(u64, u64)> {
        self.remove_whole(py, Remove::Pattern(regex), force)
    }

    /// Removes every block of the namespace. Returns `(removed, kept)`, as `remove_matching` does.
    #[pyo3(signature = (*, force=false))]
    fn remove_all(&self, py: Python<'_>, force: bool) -> PyResult<(u64, u64)> {
        self.remove_whole(py, Remove::Namespace, force)
    }

    /// Returns an iterator of `Listed` over the blocks of the namespace whose keys match a regular expression;
    /// an empty expression matches all. The client fetches a page at a time and leases nothing. Blocks that
    /// are put or removed meanwhile may be listed or not. The iteration raises an Error when the master cannot be
    /// asked.
    #[pyo3(signature = (regex=String::new()))]
    fn list(&self, regex: String) -> PyResult<Listing> {
        self.open()?;
        Ok(Listing::new(Arc::clone(&self.connection), regex))
    }

    /// Returns a `Description` for each key, None for a miss. Leases nothing. Raises as `is_exist` does.
    fn describe<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Option<Description>>> {
        let keys = read_keys(keys)?;
        let described = self.call(py, |client| client.describe(&keys))?;
        described
            .into_iter()
            .map(|one| one.map(|one| Description::new(py, one)).transpose())
            .collect()
    }

    /// Returns the master's counts of blocks, bytes, nodes and segments. Raises an Error when the master
    /// cannot be asked.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        let stats = self.call(py, Client::stats)?;
        Stats::new(py, stats)
    }

    /// Returns the counters of this connection by name: hits, misses, bytes moved by each transport.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let counters = PyDict::new(py);
        for (name, count) in open.get()?.client.counters().named() {
            counters.set_item(name, count)?;
        }
        Ok(counters)
    }

    /// Returns the latencies of this connection by operation. Each is a dict with `count`, `seconds` (their
    /// sum), and `buckets`: a list of (upper end in seconds or None, count of the bucket).
    ///
    /// `get` and `put` are whole batches. `read_` and `write_` with a transport are transfers with one store
    /// node. Capitalized names are calls to the master. An operation that never ran has no entry.
    fn latencies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let latencies = PyDict::new(py);
        for latency in open.get()?.client.latencies() {
            let seconds = |end: Option<Duration>| end.map(|end| end.as_secs_f64());
            let buckets: Vec<(Option<f64>, u64)> = latency
                .buckets()
                .map(|(end, count)| (seconds(end), count))
                .collect();
            let of = PyDict::new(py);
            of.set_item("count", latency.count())?;
            of.set_item("seconds", latency.total.as_secs_f64())?;
            of.set_item("buckets", buckets)?;
            latencies.set_item(latency.operation, of)?;
        }
        Ok(latencies)
    }

    /// The pool's limits, agreed at connect and again with each new leader.
    #[getter]
    fn limits(&self) -> PyResult<Limits> {
        let open = self.open()?;
        Ok(open.get()?.client.limits().into())
    }

    /// Whether the pool is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Closes the connection. Calls in progress continue to their end; later calls raise ClosedError. Views
    /// stay valid. A second close has no effect.
    fn close(&self, py: Python<'_>) {
        let open = self.connection.close();
        py.detach(|| drop(open));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("<kvpool.Pool of {}, {state}>", self.masters)
    }
}

impl Pool {
    fn remove_whole(&self, py: Python<'_>, what: Remove, force: bool) -> PyResult<(u64, u64)> {
        let removed = self.call(py, |client| client.remove(what, force))?;
        Ok((removed.removed, removed.kept))
    }
}
