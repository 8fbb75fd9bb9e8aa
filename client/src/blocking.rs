//! The client for callers without an async runtime: the same operations, each of which blocks.

use crate::api::{
    Description, Existence, GetBlock, GetOptions, Leasing, Limits, Listing, Lookup, Page,
    PoolStats, Put, PutBlock, PutOptions, Remove, Removed, ViewOptions,
};
use crate::counters::Counters;
use crate::errors::{ConnectError, ControlError, GetError, PutError, RemoveError};
use crate::gpu::{GpuBuffer, GpuSlice};
use crate::options::Options;
use crate::packed::PackedKeys;
use crate::view::View;
use kvpool_transport::Slice;
use kvpool_transport::gpu::GpuError;
use kvpool_transport::rdma::RegisteredBuffer;
use kvpool_types::{Key, Length, Offset};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// A connection to the pool for plain threads. Clones share it.
///
/// The thread that makes a call does its work: it sends, waits on the sockets, and copies what is
/// small, so that no other has to be woken. A second thread does what nobody waits for.
///
/// Its methods panic when they are called from within an async runtime, as all blocking there would
/// stop that runtime's other work: use [`crate::Client`] there.
#[derive(Clone, Debug)]
pub struct Client {
    client: crate::Client,
    runtimes: Arc<Runtimes>,
}

/// Where the work is done.
#[derive(Debug)]
struct Runtimes {
    /// Run by those who call, while they wait.
    callers: Runtime,
    /// Runs by itself.
    background: Runtime,
}

impl Runtimes {
    fn wait<F: Future>(&self, work: F) -> F::Output {
        self.callers.block_on(work)
    }
}

/// A lease that a blocking client holds. See [`crate::Lease`].
#[derive(Debug)]
#[must_use = "a lease that nobody needs is better released than left to run out"]
pub struct Lease {
    lease: crate::Lease,
    runtimes: Arc<Runtimes>,
}

/// How much of a chain is present. See [`crate::Prefix`].
#[derive(Debug)]
pub struct Prefix {
    /// How many leading blocks are there.
    pub blocks: usize,
    /// The lease on them.
    pub lease: Lease,
}

impl Client {
    /// Connects to the pool.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        let built = |runtime: std::io::Result<Runtime>| {
            runtime.map_err(|error| ConnectError::NoRuntime(error.to_string()))
        };
        let runtimes = Runtimes {
            callers: built(Builder::new_current_thread().enable_all().build())?,
            background: built(
                Builder::new_multi_thread()
                    .worker_threads(1)
                    .enable_all()
                    .thread_name("kvpool-client")
                    .build(),
            )?,
        };
        let background = runtimes.background.handle().clone();
        let client = runtimes.wait(crate::Client::connect_on(options, background))?;
        Ok(Self {
            client,
            runtimes: Arc::new(runtimes),
        })
    }

    /// See [`crate::Client::batch_put`].
    pub fn batch_put(
        &self,
        blocks: Vec<PutBlock>,
        options: &PutOptions,
    ) -> Vec<Result<Put, PutError>> {
        self.wait(self.client.batch_put(blocks, options))
    }

    /// See [`crate::Client::upsert`].
    pub fn upsert(
        &self,
        blocks: Vec<PutBlock>,
        options: &PutOptions,
    ) -> Vec<Result<Put, PutError>> {
        self.wait(self.client.upsert(blocks, options))
    }

    /// See [`crate::Client::put`].
    pub fn put(&self, key: &Key, bytes: Vec<u8>) -> Result<Put, PutError> {
        self.wait(self.client.put(key, bytes))
    }

    /// See [`crate::Client::batch_get`].
    pub fn batch_get(
        &self,
        gets: Vec<GetBlock>,
        options: &GetOptions,
    ) -> Vec<Result<Lookup, GetError>> {
        self.wait(self.client.batch_get(gets, options))
    }

    /// See [`crate::Client::get`].
    pub fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, GetError> {
        self.wait(self.client.get(key))
    }

    /// See [`crate::Client::get_placed`].
    pub fn get_placed(
        &self,
        key: &Key,
        timeout: Option<Duration>,
        place: impl FnMut(Length) -> Option<Slice>,
    ) -> Result<Lookup, GetError> {
        self.wait(self.client.get_placed(key, timeout, place))
    }

    /// See [`crate::Client::get_range`].
    pub fn get_range(
        &self,
        key: &Key,
        from: Offset,
        buffers: Vec<Slice>,
        options: &GetOptions,
    ) -> Result<Lookup, GetError> {
        self.wait(self.client.get_range(key, from, buffers, options))
    }

    /// See [`crate::Client::get_view`].
    pub fn get_view(&self, key: &Key, options: &ViewOptions) -> Result<Option<View>, GetError> {
        self.wait(self.client.get_view(key, options))
    }

    /// See [`crate::Client::register_gpu_buffer`].
    pub fn register_gpu_buffer(&self, address: u64, length: Length) -> Result<GpuBuffer, GpuError> {
        self.client.register_gpu_buffer(address, length)
    }

    /// See [`crate::Client::batch_put_gpu`].
    pub fn batch_put_gpu(
        &self,
        blocks: Vec<PutBlock<GpuSlice>>,
        options: &PutOptions,
    ) -> Vec<Result<Put, PutError>> {
        self.wait(self.client.batch_put_gpu(blocks, options))
    }

    /// See [`crate::Client::batch_get_gpu`].
    pub fn batch_get_gpu(
        &self,
        blocks: Vec<GetBlock<GpuSlice>>,
        options: &GetOptions,
    ) -> Vec<Result<Lookup, GetError>> {
        self.wait(self.client.batch_get_gpu(blocks, options))
    }

    /// See [`crate::Client::is_exist`].
    pub fn is_exist(&self, keys: &[Key]) -> Result<Vec<bool>, ControlError> {
        self.wait(self.client.is_exist(keys))
    }

    /// See [`crate::Client::exist`].
    pub fn exist(
        &self,
        keys: &[Key],
        leasing: Leasing,
    ) -> Result<(Vec<bool>, Lease), ControlError> {
        let Existence { present, lease } = self.wait(self.client.exist(keys, leasing))?;
        Ok((present, self.own(lease)))
    }

    /// See [`crate::Client::exist_packed`].
    pub fn exist_packed(
        &self,
        keys: PackedKeys,
        leasing: Leasing,
    ) -> Result<(Vec<bool>, Lease), ControlError> {
        let Existence { present, lease } = self.wait(self.client.exist_packed(keys, leasing))?;
        Ok((present, self.own(lease)))
    }

    /// See [`crate::Client::packer`].
    pub fn packer(&self) -> PackedKeys {
        self.client.packer()
    }

    /// See [`crate::Client::match_prefix`].
    pub fn match_prefix(&self, keys: &[Key]) -> Result<Prefix, ControlError> {
        self.match_prefix_with(keys, Leasing::Lease)
    }

    /// See [`crate::Client::match_prefix_with`].
    pub fn match_prefix_with(
        &self,
        keys: &[Key],
        leasing: Leasing,
    ) -> Result<Prefix, ControlError> {
        let mut packed = self.packer();
        keys.iter().for_each(|key| packed.push(key.as_ref()));
        self.match_prefix_packed(packed, leasing)
    }

    /// See [`crate::Client::match_prefix_packed`].
    pub fn match_prefix_packed(
        &self,
        keys: PackedKeys,
        leasing: Leasing,
    ) -> Result<Prefix, ControlError> {
        let prefix = self.wait(self.client.match_prefix_packed(keys, leasing))?;
        Ok(Prefix {
            blocks: prefix.blocks,
            lease: self.own(prefix.lease),
        })
    }

    /// See [`crate::Client::get_size`].
    pub fn get_size(&self, key: &Key) -> Result<Option<Length>, ControlError> {
        self.wait(self.client.get_size(key))
    }

    /// See [`crate::Client::describe`].
    pub fn describe(&self, keys: &[Key]) -> Result<Vec<Option<Description>>, ControlError> {
        self.wait(self.client.describe(keys))
    }

    /// See [`crate::Client::list`].
    pub fn list(
        &self,
        pattern: &str,
        limit: u32,
        page: Option<&Page>,
    ) -> Result<Listing, ControlError> {
        self.wait(self.client.list(pattern, limit, page))
    }

    /// See [`crate::Client::remove`].
    pub fn remove(&self, what: Remove, force: bool) -> Result<Removed, RemoveError> {
        self.wait(self.client.remove(what, force))
    }

    /// See [`crate::Client::stats`].
    pub fn stats(&self) -> Result<PoolStats, ControlError> {
        self.wait(self.client.stats())
    }

    /// See [`crate::Client::register_buffer`].
    pub fn register_buffer(&self, memory: &Slice) -> std::io::Result<RegisteredBuffer> {
        self.client.register_buffer(memory)
    }

    /// See [`crate::Client::counters`].
    pub fn counters(&self) -> Counters {
        self.client.counters()
    }

    /// See [`crate::Client::limits`].
    pub fn limits(&self) -> Limits {
        self.client.limits()
    }

    fn own(&self, lease: crate::Lease) -> Lease {
        Lease {
            lease,
            runtimes: Arc::clone(&self.runtimes),
        }
    }

    fn wait<F: Future>(&self, work: F) -> F::Output {
        self.runtimes.wait(work)
    }
}

impl Lease {
    /// See [`crate::Lease::renew`].
    pub fn renew(&mut self) -> Result<usize, ControlError> {
        self.runtimes.wait(self.lease.renew())
    }

    /// See [`crate::Lease::release`].
    pub fn release(self) -> Result<(), ControlError> {
        self.runtimes.wait(self.lease.release())
    }

    /// The lease itself.
    pub const fn get(&self) -> &crate::Lease {
        &self.lease
    }
}
