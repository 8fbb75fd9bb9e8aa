//! The client for callers without an async runtime: the same operations, each of which blocks.

mod namespaces;
mod replica_tasks;

use crate::api::{
    Description, Existence, GetBlock, GetOptions, GetOutcome, Leasing, Limits, Listing, Page,
    PoolStats, PutBlock, PutOptions, PutOutcome, Remove, Removed, ViewOptions,
};
use crate::counters::Counters;
use crate::errors::{ConnectError, ControlError, GetError, PutError, RemoveError};
use crate::gpu::{GpuBuffer, GpuSlice};
use crate::latencies::Latency;
use crate::options::{Options, Timeouts};
use crate::packed::PackedKeys;
use crate::view::View;
use kvpool_transport::Slice;
use kvpool_transport::channel::WaitedOn;
use kvpool_transport::gpu::GpuError;
use kvpool_transport::rdma::RegisteredBuffer;
use kvpool_types::{Code, Key, Length, Offset};
use std::cell::Cell;
use std::fmt::Debug;
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// How often a waiting call asks its [`CancelCheck`].
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How long the drop of a client waits for its blocking tasks. Usually they end within this time.
const ENDING: Duration = Duration::from_millis(100);

/// Decides, while a blocking call waits, whether the call is cancelled.
///
/// The client asks on the calling thread and outside its own runtime, so a slow answer does not stop the
/// calls of other threads. A cancelled call returns at once with [`Code::DeadlineExceeded`]. Its
/// transfers run to their own end, as after a dropped future.
pub trait CancelCheck: Debug + Send + Sync {
    /// Whether calls of the current thread can be cancelled.
    fn applies_here(&self) -> bool;

    /// Whether the call that waits on the current thread is cancelled.
    fn is_cancelled(&self) -> bool;
}

/// A connection to the pool for threads without an async runtime. Clones share the connection.
///
/// The calling thread does the call's work: it sends, waits on the sockets, and copies small blocks. No other
/// thread has to be woken. A background thread does the work that no call waits for.
///
/// The methods panic when they are called from within an async runtime. Blocking there would stop the other
/// tasks of that runtime: use [`crate::Client`] instead.
#[derive(Clone, Debug)]
pub struct Client {
    client: crate::Client,
    runtimes: Arc<Runtimes>,
}

/// The two runtimes of a blocking client.
#[derive(Debug)]
struct Runtimes {
    /// Runs on the calling threads, while their calls wait.
    callers: OwnRuntime,
    /// Runs on a thread of its own.
    background: OwnRuntime,
    cancel: Option<Arc<dyn CancelCheck>>,
}

/// A runtime whose drop waits at most [`ENDING`] for blocking tasks.
#[derive(Debug)]
struct OwnRuntime(Option<Runtime>);

impl Deref for OwnRuntime {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        self.0
            .as_ref()
            .expect("invariant: a runtime is there until it is dropped")
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // A plain drop of the runtime waits for blocking tasks without a limit, and a name resolver may
            // never answer. All such tasks own the memory that they use.
            runtime.shutdown_timeout(ENDING);
        }
    }
}

impl Runtimes {
    fn start(cancel: Option<Arc<dyn CancelCheck>>) -> Result<Self, ConnectError> {
        let built = |runtime: std::io::Result<Runtime>| {
            runtime
                .map(|runtime| OwnRuntime(Some(runtime)))
                .map_err(|error| ConnectError::NoRuntime(error.to_string()))
        };
        Ok(Self {
            callers: built(Builder::new_current_thread().enable_all().build())?,
            background: built(
                Builder::new_multi_thread()
                    .worker_threads(1)
                    .enable_all()
                    .thread_name("kvpool-client")
                    .build(),
            )?,
            cancel,
        })
    }

    /// Runs `work` to its end without asking for cancellation. Calls that touch a GPU's memory need this.
    fn to_the_end<F: Future>(&self, work: F) -> F::Output {
        self.callers.block_on(work)
    }

    /// Runs `work` to its end; `None` when the caller has cancelled the call.
    fn run<F: Future>(&self, work: F) -> Option<F::Output> {
        let Some(cancel) = self.cancel.as_ref().filter(|asked| asked.applies_here()) else {
            return Some(self.to_the_end(work));
        };
        let mut work = pin!(work);
        let mut waited_on = WaitedOn::default();
        loop {
            // Most calls of a few microseconds end at the first poll and set no timer.
            let mut timer = None;
            let slice = poll_fn(|cx| {
                if let Poll::Ready(done) = waited_on.watch(|| work.as_mut().poll(cx)) {
                    return Poll::Ready(Some(done));
                }
                let timer = timer
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(CANCEL_CHECK_INTERVAL)));
                timer.as_mut().poll(cx).map(|()| None)
            });
            if let Some(done) = self.callers.block_on(slice) {
                return Some(done);
            }
            // The answer of `is_cancelled` may take seconds. This thread first leaves the sockets to the
            // calls of other threads.
            waited_on.leave();
            if cancel.is_cancelled() {
                return None;
            }
        }
    }

    /// [`Runtimes::run`] for a call with one outcome.
    fn one<T, E: GivenUp>(&self, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        self.run(work).unwrap_or_else(|| Err(E::given_up()))
    }

    /// [`Runtimes::run`] for a batch with `count` outcomes.
    fn each<T, E: GivenUp>(
        &self,
        count: usize,
        work: impl Future<Output = Vec<Result<T, E>>>,
    ) -> Vec<Result<T, E>> {
        let given_up = || (0..count).map(|_| Err(E::given_up())).collect();
        self.run(work).unwrap_or_else(given_up)
    }
}

/// The error of a cancelled call.
trait GivenUp {
    fn given_up() -> Self;
}

impl GivenUp for ControlError {
    fn given_up() -> Self {
        Self::new(Code::DeadlineExceeded, "the caller cancelled the call")
    }
}

impl GivenUp for ConnectError {
    fn given_up() -> Self {
        Self::Refused {
            masters: "the pool".to_owned(),
            source: GivenUp::given_up(),
        }
    }
}

impl GivenUp for GetError {
    fn given_up() -> Self {
        ControlError::given_up().into()
    }
}

impl GivenUp for RemoveError {
    fn given_up() -> Self {
        Self::OutcomeUnknown(GivenUp::given_up())
    }
}

impl GivenUp for PutError {
    fn given_up() -> Self {
        let ControlError { code, message } = GivenUp::given_up();
        Self::OutcomeUnknown { code, message }
    }
}

/// A lease that a blocking client holds. See [`crate::Lease`].
#[derive(Debug)]
#[must_use = "release a lease that is no longer needed, instead of letting it expire"]
pub struct Lease {
    lease: crate::Lease,
    runtimes: Arc<Runtimes>,
}

/// How much of a chain is present. See [`crate::Prefix`].
#[derive(Debug)]
pub struct Prefix {
    /// The number of leading blocks that are present.
    pub blocks: usize,
    /// The lease on these blocks.
    pub lease: Lease,
}

impl Client {
    /// Connects to the pool.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] as of [`crate::Client::connect`], or when the two runtimes cannot be
    /// started.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        Self::connect_with(options, None)
    }

    /// Connects to the pool. The client asks `cancel` during this call and during every later call.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] as of [`Client::connect`], or when `cancel` ends the call.
    pub fn connect_with(
        options: Options,
        cancel: Option<Arc<dyn CancelCheck>>,
    ) -> Result<Self, ConnectError> {
        let runtimes = Runtimes::start(cancel)?;
        let background = runtimes.background.handle().clone();
        let client = runtimes.one(crate::Client::connect_on(options, background))?;
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
    ) -> Vec<Result<PutOutcome, PutError>> {
        let count = blocks.len();
        self.runtimes
            .each(count, self.client.batch_put(blocks, options))
    }

    /// See [`crate::Client::upsert`].
    pub fn upsert(
        &self,
        blocks: Vec<PutBlock>,
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, PutError>> {
        let count = blocks.len();
        self.runtimes
            .each(count, self.client.upsert(blocks, options))
    }

    /// See [`crate::Client::put`].
    pub fn put(&self, key: &Key, bytes: Vec<u8>) -> Result<PutOutcome, PutError> {
        self.runtimes.one(self.client.put(key, bytes))
    }

    /// See [`crate::Client::batch_get`].
    pub fn batch_get(
        &self,
        gets: Vec<GetBlock>,
        options: &GetOptions,
    ) -> Vec<Result<GetOutcome, GetError>> {
        let count = gets.len();
        self.runtimes
            .each(count, self.client.batch_get(gets, options))
    }

    /// See [`crate::Client::get`].
    pub fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, GetError> {
        self.runtimes.one(self.client.get(key))
    }

    /// See [`crate::Client::get_placed`]. `place` runs outside the client's runtime, so it may wait for a
    /// lock. The calls of other threads wait in that runtime and are not held up.
    pub fn get_placed(
        &self,
        key: &Key,
        timeout: Option<Duration>,
        mut place: impl FnMut(Length) -> Option<Slice>,
    ) -> Result<GetOutcome, GetError> {
        let (asked, given) = (Cell::new(None), Cell::new(None));
        let work = self.client.get_placed(key, timeout, async |length| {
            asked.set(Some(length));
            poll_fn(|_| given.take().map_or(Poll::Pending, Poll::Ready)).await
        });
        let mut work = pin!(work);
        loop {
            let step = poll_fn(|cx| match work.as_mut().poll(cx) {
                Poll::Ready(found) => Poll::Ready(found.map(Some)),
                Poll::Pending if asked.get().is_some() => Poll::Ready(Ok(None)),
                Poll::Pending => Poll::Pending,
            });
            if let Some(found) = self.runtimes.one(step)? {
                return Ok(found);
            }
            if let Some(length) = asked.take() {
                given.set(Some(place(length)));
            }
        }
    }

    /// See [`crate::Client::get_range`].
    pub fn get_range(
        &self,
        key: &Key,
        from: Offset,
        buffers: Vec<Slice>,
        options: &GetOptions,
    ) -> Result<GetOutcome, GetError> {
        self.runtimes
            .one(self.client.get_range(key, from, buffers, options))
    }

    /// See [`crate::Client::get_view`].
    pub fn get_view(&self, key: &Key, options: &ViewOptions) -> Result<Option<View>, GetError> {
        self.runtimes.one(self.client.get_view(key, options))
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
    ) -> Vec<Result<PutOutcome, PutError>> {
        self.runtimes
            .to_the_end(self.client.batch_put_gpu(blocks, options))
    }

    /// See [`crate::Client::batch_get_gpu`].
    pub fn batch_get_gpu(
        &self,
        blocks: Vec<GetBlock<GpuSlice>>,
        options: &GetOptions,
    ) -> Vec<Result<GetOutcome, GetError>> {
        self.runtimes
            .to_the_end(self.client.batch_get_gpu(blocks, options))
    }

    /// See [`crate::Client::is_exist`].
    pub fn is_exist(&self, keys: &[Key]) -> Result<Vec<bool>, ControlError> {
        self.runtimes.one(self.client.is_exist(keys))
    }

    /// See [`crate::Client::exist`].
    pub fn exist(
        &self,
        keys: &[Key],
        leasing: Leasing,
    ) -> Result<(Vec<bool>, Lease), ControlError> {
        let Existence { present, lease } = self.runtimes.one(self.client.exist(keys, leasing))?;
        Ok((present, self.own(lease)))
    }

    /// See [`crate::Client::exist_packed`].
    pub fn exist_packed(
        &self,
        keys: PackedKeys,
        leasing: Leasing,
    ) -> Result<(Vec<bool>, Lease), ControlError> {
        let Existence { present, lease } =
            self.runtimes.one(self.client.exist_packed(keys, leasing))?;
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
        let prefix = self
            .runtimes
            .one(self.client.match_prefix_packed(keys, leasing))?;
        Ok(Prefix {
            blocks: prefix.blocks,
            lease: self.own(prefix.lease),
        })
    }

    /// See [`crate::Client::get_size`].
    pub fn get_size(&self, key: &Key) -> Result<Option<Length>, ControlError> {
        self.runtimes.one(self.client.get_size(key))
    }

    /// See [`crate::Client::describe`].
    pub fn describe(&self, keys: &[Key]) -> Result<Vec<Option<Description>>, ControlError> {
        self.runtimes.one(self.client.describe(keys))
    }

    /// See [`crate::Client::list`].
    pub fn list(
        &self,
        pattern: &str,
        limit: u32,
        page: Option<&Page>,
    ) -> Result<Listing, ControlError> {
        self.runtimes.one(self.client.list(pattern, limit, page))
    }

    /// See [`crate::Client::remove`].
    pub fn remove(&self, what: Remove, force: bool) -> Result<Removed, RemoveError> {
        self.runtimes.one(self.client.remove(what, force))
    }

    /// See [`crate::Client::stats`].
    pub fn stats(&self) -> Result<PoolStats, ControlError> {
        self.runtimes.one(self.client.stats())
    }

    /// See [`crate::Client::register_buffer`].
    pub fn register_buffer(&self, memory: &Slice) -> std::io::Result<RegisteredBuffer> {
        self.client.register_buffer(memory)
    }

    /// See [`crate::Client::latencies`].
    pub fn latencies(&self) -> Vec<Latency> {
        self.client.latencies()
    }

    /// See [`crate::Client::counters`].
    pub fn counters(&self) -> Counters {
        self.client.counters()
    }

    /// See [`crate::Client::timeouts`].
    pub fn timeouts(&self) -> Timeouts {
        self.client.timeouts()
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
}

impl Lease {
    /// See [`crate::Lease::renew`].
    pub fn renew(&mut self) -> Result<usize, ControlError> {
        self.runtimes.one(self.lease.renew())
    }

    /// See [`crate::Lease::split_off`].
    pub fn split_off(&mut self, keys: &[Key]) -> Self {
        Self {
            lease: self.lease.split_off(keys),
            runtimes: Arc::clone(&self.runtimes),
        }
    }

    /// See [`crate::Lease::release`].
    pub fn release(self) -> Result<(), ControlError> {
        self.runtimes.one(self.lease.release())
    }

    /// The lease of the async client.
    pub const fn get(&self) -> &crate::Lease {
        &self.lease
    }
}

#[cfg(test)]
mod tests;
