//! The client that callers hold, with its operations.

use crate::api::{
    GetBlock, GetOptions, GetOutcome, Limits, PutBlock, PutOptions, PutOutcome, ViewOptions,
};
use crate::cache::Locations;
use crate::clock::Deadline;
use crate::context::ClientContext;
use crate::control::{Carry, Control};
use crate::counters::{Counters, Counting};
use crate::dialer::Dialer;
use crate::errors::{ConnectError, GetError, PutError};
use crate::latencies::Latency;
use crate::links::{Dial, Links};
use crate::options::{Options, Timeouts, TransportChoice};
use crate::releases::{Holding, Releases};
use crate::revoker::Revoker;
use crate::view::View;
use crate::{get, put, range, view};
use kvpool_transport::machine::host_id;
use kvpool_transport::rdma::{Fabric, RegisteredBuffer};
use kvpool_transport::{Region, Slice};
use kvpool_types::{ClientId, ClusterId, Code, Epoch, HostId, Key, Length, Offset};
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

/// A connection to the pool. Clones share the connection, which closes when the last clone is dropped.
///
/// Every operation returns by its timeout. A batch has one outcome per key. One bad key never fails the other
/// keys, and each duplicate of a key gets its own outcome.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) inner: Arc<ClientContext>,
}

impl Client {
    /// Connects to the pool: agrees on a version with the master and announces the namespace.
    /// Call it on a tokio runtime; the client runs its tasks there.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when the options are invalid, when no master accepts the client within
    /// [`crate::Timeouts::connect`], or when RDMA is required and not available.
    ///
    /// # Cancellation
    ///
    /// Dropping the future closes the connections that it opened.
    pub async fn connect(options: Options) -> Result<Self, ConnectError> {
        Self::connect_on(options, Handle::current()).await
    }

    /// [`Client::connect`] with a runtime for background tasks. `background` must run by itself. The current
    /// runtime needs to run only while operations of this client are awaited.
    pub(crate) async fn connect_on(
        options: Options,
        background: Handle,
    ) -> Result<Self, ConnectError> {
        let rdma = open_rdma(&options).await?;
        let ports = rdma.clone();
        Self::connect_with(options, background, rdma, |control, options| {
            Box::new(Dialer::new(
                control.cluster(),
                control.client(),
                control.credentials().clone(),
                ports,
                options.tcp_connections_per_node,
                control.tls(),
            ))
        })
        .await
    }

    /// [`Client::connect_on`] with another way to open links.
    pub(crate) async fn connect_with(
        options: Options,
        background: Handle,
        rdma: Option<Arc<Fabric>>,
        dialer: impl FnOnce(&Control, &Options) -> Box<dyn Dial>,
    ) -> Result<Self, ConnectError> {
        let host = host_id().map_err(|error| ConnectError::NoHostId(error.to_string()))?;
        Self::connect_over(options, background, rdma, dialer, host, None).await
    }

    /// [`Client::connect_with`] on a given host, over a network that may be simulated.
    pub(crate) async fn connect_over(
        options: Options,
        background: Handle,
        rdma: Option<Arc<Fabric>>,
        dialer: impl FnOnce(&Control, &Options) -> Box<dyn Dial>,
        host: HostId,
        carrier: Option<Arc<dyn Carry>>,
    ) -> Result<Self, ConnectError> {
        let counting = Arc::new(Counting::default());
        let locations = Arc::new(Locations::new(options.location_cache));
        let control = Box::pin(Control::connect(
            &options,
            host,
            Arc::clone(&locations),
            Arc::clone(&counting),
            background,
            carrier,
        ))
        .await?;
        let control = Arc::new(control);
        let links = Links::new(
            dialer(&control, &options),
            control.host(),
            options.transport,
            rdma.is_some(),
            Arc::clone(&counting),
        );
        Ok(Self {
            inner: Arc::new(ClientContext {
                revoker: Revoker::start(&control),
                releases: Arc::new(Releases::new(
                    Arc::clone(&control),
                    options.max_message_bytes.as_usize(),
                )),
                options,
                control,
                locations,
                links,
                counting,
                rdma,
                staging: OnceLock::new(),
            }),
        })
    }

    /// Puts blocks: one outcome per block, in order. A present block stays unchanged unless
    /// [`PutOptions::upsert`] is set. Of several blocks with one key the first is put, or with
    /// `upsert` the last. With `upsert` all of them have the outcome of the last, but an empty or too large one
    /// has its own error. A put waits for free room within its timeout.
    ///
    /// # Errors
    ///
    /// Per block: [`PutError::Empty`], [`PutError::TooLarge`], or [`PutError::Failed`] with the code of the
    /// last attempt once the timeout has passed. A block that can never fit fails at once with
    /// [`Code::TooLarge`] or [`Code::OverQuota`]. [`PutError::OutcomeUnknown`] means that the block may be
    /// visible or not.
    ///
    /// # Cancellation
    ///
    /// Dropping the future revokes the reservations that are not committed. A commit that was sent may
    /// still make its block visible. Buffers must not change until the timeout has passed.
    pub async fn batch_put(
        &self,
        blocks: Vec<PutBlock>,
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, PutError>> {
        Box::pin(put::put(&self.inner, blocks, options)).await
    }

    /// [`Client::batch_put`] that writes a new version of blocks that are present.
    ///
    /// # Errors
    ///
    /// Those of [`Client::batch_put`], which also describes cancellation.
    pub async fn upsert(
        &self,
        blocks: Vec<PutBlock>,
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, PutError>> {
        let options = PutOptions {
            upsert: true,
            ..options.clone()
        };
        self.batch_put(blocks, &options).await
    }

    /// Puts one block from owned bytes.
    ///
    /// # Errors
    ///
    /// Those of [`Client::batch_put`], which also describes cancellation.
    pub async fn put(&self, key: &Key, bytes: Vec<u8>) -> Result<PutOutcome, PutError> {
        let block = PutBlock::new(key.clone(), Region::from(bytes).whole());
        self.batch_put(vec![block], &PutOptions::default())
            .await
            .pop()
            .unwrap_or_else(|| {
                Err(PutError::Failed {
                    code: Code::Internal,
                    message: "internal fault: a batch of one block has no outcome".to_owned(),
                })
            })
    }

    /// Gets blocks into the caller's memory: one outcome per block, in order. For a hit, the client has
    /// verified the bytes against the checksum that the writer committed.
    ///
    /// # Errors
    ///
    /// Per block: [`GetError::BufferTooSmall`], or [`GetError::Failed`] with the code of the last attempt
    /// when no replica could be read within the timeout. Buffers of one block that overlap are
    /// [`Code::InvalidArgument`]. An absent block is [`GetOutcome::Miss`].
    ///
    /// # Cancellation
    ///
    /// Dropping the future releases its leases. Transfers in progress may write into the buffers
    /// until the timeout has passed.
    pub async fn batch_get(
        &self,
        gets: Vec<GetBlock>,
        options: &GetOptions,
    ) -> Vec<Result<GetOutcome, GetError>> {
        Box::pin(get::get(&self.inner, gets, options)).await
    }

    /// Gets one block as owned bytes; `None` when it is absent.
    ///
    /// # Errors
    ///
    /// Those of [`Client::batch_get`], which also describes cancellation.
    pub async fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, GetError> {
        let mut memory = None;
        let mut place = |length| Some(memory.insert(Region::allocate(length)).whole());
        let found = self
            .get_placed(key, None, async |length| place(length))
            .await?;
        Ok(match (found, memory) {
            (GetOutcome::Hit { length, .. }, Some(memory)) => {
                memory.slice(Offset(0), length).map(|block| block.to_vec())
            }
            _ => None,
        })
    }

    /// Gets one block into memory that `place` provides once the block's length is known. If a longer version
    /// of the block is committed meanwhile, the client calls `place` again. From then on it does not use the
    /// memory of the earlier call.
    ///
    /// # Errors
    ///
    /// [`GetError::Failed`] with [`Code::Internal`] when `place` provides no memory. Otherwise
    /// those of [`Client::batch_get`], which also describes cancellation.
    pub async fn get_placed(
        &self,
        key: &Key,
        timeout: Option<Duration>,
        mut place: impl AsyncFnMut(Length) -> Option<Slice>,
    ) -> Result<GetOutcome, GetError> {
        let deadline = Deadline::after(timeout.unwrap_or(self.inner.options.timeouts.get));
        // The lease of the length lookup is held until the block is read.
        let mut holding = self.inner.hold();
        let mut length = match self.known_length(key, deadline, &mut holding).await? {
            Some(length) => length,
            None => {
                Counting::one(&self.inner.counting.misses);
                return Ok(GetOutcome::Miss);
            }
        };
        loop {
            let memory = place(length).await.ok_or_else(|| GetError::Failed {
                code: Code::Internal,
                message: format!("the caller provided no memory for a block of {length} bytes"),
            })?;
            let options = GetOptions {
                timeout: Some(deadline.left()),
                release: false,
            };
            let gets = vec![GetBlock::new(key.clone(), memory)];
            match self.batch_get(gets, &options).await.pop() {
                // A longer version was committed after the length was read.
                Some(Err(GetError::BufferTooSmall { block, .. })) if !deadline.has_passed() => {
                    length = block;
                }
                Some(outcome) => return outcome,
                None => return Ok(GetOutcome::Miss),
            }
        }
    }

    /// Gets a part of a block: as many bytes from offset `from` as `buffers` hold. Only the 64 KiB
    /// chunks that the range touches are moved and verified.
    ///
    /// # Errors
    ///
    /// [`GetError::OutsideBlock`] when the range exceeds the block. Otherwise those of
    /// [`Client::batch_get`], which also describes cancellation.
    pub async fn get_range(
        &self,
        key: &Key,
        from: Offset,
        buffers: Vec<Slice>,
        options: &GetOptions,
    ) -> Result<GetOutcome, GetError> {
        Box::pin(range::get_range(&self.inner, key, from, buffers, options)).await
    }

    /// Takes a view of a block that has a replica on this host. The caller reads the bytes in place. `None`
    /// when the block is absent.
    ///
    /// # Errors
    ///
    /// [`GetError::NotLocal`] when shared memory reaches no replica; else as [`Client::batch_get`].
    ///
    /// # Cancellation
    ///
    /// Dropping the future releases its lease and its pin.
    pub async fn get_view(
        &self,
        key: &Key,
        options: &ViewOptions,
    ) -> Result<Option<View>, GetError> {
        Box::pin(view::get_view(&self.inner, key, options)).await
    }

    /// Registers memory with the RDMA ports of this host, for buffers that are used repeatedly. The memory
    /// stays registered until the returned value is dropped. Without this call, memory is registered at its
    /// first use and stays in a cache for a while. Without RDMA the call does nothing. The call blocks while
    /// the system locks the pages.
    ///
    /// # Errors
    ///
    /// When the system cannot lock so much memory (see `ulimit -l`).
    pub fn register_buffer(&self, memory: &Slice) -> std::io::Result<RegisteredBuffer> {
        match &self.inner.rdma {
            Some(fabric) => fabric.register_buffer(memory),
            None => Ok(RegisteredBuffer::default()),
        }
    }

    /// The counters of this client since it connected.
    pub fn counters(&self) -> Counters {
        self.inner.counting.snapshot()
    }

    /// The latencies of this client's operations since it connected. Operations without a call are
    /// left out.
    pub fn latencies(&self) -> Vec<Latency> {
        self.inner.counting.latencies.snapshot()
    }

    /// The timeouts of calls that give none.
    pub fn timeouts(&self) -> Timeouts {
        self.inner.options.timeouts
    }

    /// The limits that the master stated last.
    pub fn limits(&self) -> Limits {
        self.inner.control.limits()
    }

    /// The highest epoch seen.
    pub fn epoch(&self) -> Epoch {
        self.inner.control.epoch()
    }

    /// The pool's id.
    pub fn cluster_id(&self) -> ClusterId {
        self.inner.control.cluster()
    }

    /// The client's id, which is drawn at random at each connect.
    pub fn client_id(&self) -> ClientId {
        self.inner.control.client()
    }

    /// A block's length, from the location cache or from the master.
    async fn known_length(
        &self,
        key: &Key,
        deadline: Deadline,
        holding: &mut Holding,
    ) -> Result<Option<Length>, GetError> {
        let inner = &self.inner;
        let now = crate::clock::BootTime::now();
        if let Some(located) = inner.locations.get(key, inner.control.epoch(), now) {
            return Ok(Some(located.length));
        }
        // The get that follows finds the location in the cache.
        let Some(located) = inner.lookup_one(key, deadline).await? else {
            return Ok(None);
        };
        holding.add_located(key, &located);
        Ok(Some(located.length))
    }
}

/// Opens the RDMA ports of this host, if the options allow RDMA. If there are none, the client logs this
/// once. It is an error if the options allow no other transport.
async fn open_rdma(options: &Options) -> Result<Option<Arc<Fabric>>, ConnectError> {
    static SAID: Once = Once::new();
    if matches!(
        options.transport,
        TransportChoice::Shm | TransportChoice::Tcp
    ) {
        return Ok(None);
    }
    let rdma = options.rdma.clone();
    let opened = kvpool_seams::blocking(move || Fabric::shared(&rdma)).await;
    let panicked = |_| ConnectError::NoRdma("a panic while devices were opened".to_owned());
    match opened.map_err(panicked)? {
        Ok(fabric) => Ok(Some(fabric)),
        Err(reason) if options.transport == TransportChoice::Auto => {
            SAID.call_once(|| tracing::info!(%reason, "RDMA is off"));
            Ok(None)
        }
        Err(reason) => Err(ConnectError::NoRdma(reason.to_string())),
    }
}
