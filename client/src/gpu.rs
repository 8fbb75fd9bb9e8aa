//! Blocks put from and got into GPU memory.
//!
//! ```text
//!  put   device memory ─copy out─► staging (pinned) ─► put
//!  get   device memory ◄─copy in── staging (pinned) ◄─ get, verified
//! ```
//!
//! A batch is split into groups of blocks. Each group has its own piece of staging memory, so that one
//! group is copied while another is in transfer. All calls of a client share one bound on staged bytes.
//!
//! ADR 0015 says why bytes pass through pinned host memory.

mod staging;

use crate::Client;
use crate::api::{GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, PutOutcome};
use crate::clock::Deadline;
use crate::errors::{GetError, PutError};
use crate::get::count;
use crate::overlap::share_bytes;
use crate::put::order_matters;
use futures::StreamExt;
use futures::stream;
use kvpool_transport::gpu::{self, CopyEngine, Device, DeviceCopy, DeviceRange, GpuError};
use kvpool_types::{Code, Length, Offset};
use std::sync::Arc;
use tokio::sync::oneshot;

use staging::NotStaged;
pub(crate) use staging::Staging;

/// A range of a GPU's memory, registered as source of puts and target of gets.
#[derive(Clone, Debug)]
pub struct GpuBuffer {
    range: DeviceRange,
    device: Device,
    staging: Arc<Staging>,
}

/// A part of a registered range.
#[derive(Clone, Debug)]
pub struct GpuSlice {
    range: DeviceRange,
    buffer: GpuBuffer,
}

impl GpuBuffer {
    /// The whole range as a slice.
    pub fn whole(&self) -> GpuSlice {
        GpuSlice {
            range: self.range,
            buffer: self.clone(),
        }
    }

    /// The slice of `length` bytes from offset `from`; `None` when it exceeds the range.
    pub fn slice(&self, from: Offset, length: Length) -> Option<GpuSlice> {
        let range = self.range.slice(from, length)?;
        Some(GpuSlice {
            range,
            buffer: self.clone(),
        })
    }
}

impl GpuSlice {
    /// The ordinal of the slice's GPU.
    pub const fn device(&self) -> u32 {
        self.buffer.device.0
    }

    /// The slice's length in bytes.
    pub const fn length(&self) -> Length {
        self.range.length
    }
}

impl Client {
    /// Registers `length` bytes of device memory at `address` for [`Client::batch_put_gpu`] and
    /// [`Client::batch_get_gpu`]. Any of CUDA's allocators may have allocated the memory. The memory must
    /// stay allocated while calls that use it run. If the future of such a call is dropped, it must stay
    /// allocated until the call's timeout has passed.
    ///
    /// # Errors
    ///
    /// [`GpuError::Unavailable`] on a host without a GPU.
    pub fn register_gpu_buffer(&self, address: u64, length: Length) -> Result<GpuBuffer, GpuError> {
        self.register_on(gpu::open()?, DeviceRange { address, length })
    }

    /// [`Client::register_gpu_buffer`] with a given copy engine.
    pub(crate) fn register_on(
        &self,
        engine: Arc<dyn CopyEngine>,
        range: DeviceRange,
    ) -> Result<GpuBuffer, GpuError> {
        let device = engine.device_of(range)?;
        let staging = self.inner.staging.get_or_init(|| {
            let fabric = self.inner.rdma.clone();
            Arc::new(Staging::new(engine, self.inner.options.gpu_staging, fabric))
        });
        Ok(GpuBuffer {
            range,
            device,
            staging: Arc::clone(staging),
        })
    }

    /// Puts blocks from GPU memory, as [`Client::batch_put`] does from host memory. The copies begin after
    /// the work that is queued on the device's default stream. Kernels of other streams that use the buffers
    /// must have ended.
    ///
    /// # Errors
    ///
    /// As [`Client::batch_put`]. A block also fails if it spans two devices, is larger than
    /// [`crate::Options::gpu_staging`], or cannot be copied by the driver.
    ///
    /// # Cancellation
    ///
    /// As [`Client::batch_put`]. A copy that the driver has begun runs to its end.
    pub async fn batch_put_gpu(
        &self,
        blocks: Vec<PutBlock<GpuSlice>>,
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, PutError>> {
        let timeout = options.timeout.unwrap_or(self.inner.options.timeouts.put);
        let deadline = Deadline::after(timeout);
        let groups = groups(blocks, |block| &block.buffers);
        let turns = turns(&groups);
        let puts = groups
            .into_iter()
            .zip(turns)
            .map(async |(group, mut turn)| {
                let count = group.blocks.len();
                let put = self.put_group(group, &mut turn, options, deadline).await;
                // A group that failed before its turn must not end before the groups ahead of it.
                turn.comes().await;
                match put {
                    Ok(outcomes) => outcomes,
                    Err(NotStaged { code, message }) => {
                        vec![Err(PutError::Failed { code, message }); count]
                    }
                }
            });
        in_turn(puts).await
    }

    /// Gets blocks into GPU memory, as [`Client::batch_get`] does into host memory. Every byte that is copied
    /// there has been verified. The copies begin after the work that is queued on the device's default
    /// stream. Kernels of other streams that use the buffers must have ended. Kernels that are started after
    /// the return see the bytes.
    ///
    /// # Errors
    ///
    /// As [`Client::batch_get`]. A block also fails for the reasons that [`Client::batch_put_gpu`] adds.
    ///
    /// # Cancellation
    ///
    /// As [`Client::batch_get`]. A copy that the driver has begun runs to its end.
    pub async fn batch_get_gpu(
        &self,
        mut blocks: Vec<GetBlock<GpuSlice>>,
        options: &GetOptions,
    ) -> Vec<Result<GetOutcome, GetError>> {
        let timeout = options.timeout.unwrap_or(self.inner.options.timeouts.get);
        let deadline = Deadline::after(timeout);
        let overlapping: Vec<bool> = blocks.iter().map(is_overlapping).collect();
        let mut refused = overlapping.iter();
        blocks.retain(|_| refused.next() == Some(&false));
        let groups = groups(blocks, |block| &block.buffers);
        let gets = groups.into_iter().map(async |group| {
            let count = group.blocks.len();
            match self.get_group(group, options, deadline).await {
                Ok(outcomes) => outcomes,
                Err(NotStaged { code, message }) => {
                    vec![Err(GetError::Failed { code, message }); count]
                }
            }
        });
        let mut outcomes = in_turn(gets).await;
        for (at, _) in overlapping.iter().enumerate().filter(|(_, is)| **is) {
            let refused = Err(GetError::overlapping());
            count(&self.inner.counting, &refused);
            outcomes.insert(at, refused);
        }
        outcomes
    }

    async fn put_group(
        &self,
        group: Group<PutBlock<GpuSlice>>,
        turn: &mut Turn,
        options: &PutOptions,
        deadline: Deadline,
    ) -> Result<Vec<Result<PutOutcome, PutError>>, NotStaged> {
        let Place::On(GpuBuffer {
            device, staging, ..
        }) = &group.place
        else {
            group.place.check()?;
            // Such a group has nothing to copy. The put reports the fault of each block.
            let empty = group.blocks.into_iter().map(|block| PutBlock {
                key: block.key,
                parent: block.parent,
                buffers: Vec::new(),
            });
            let within = PutOptions {
                timeout: Some(deadline.left()),
                ..options.clone()
            };
            return Ok(self.batch_put(empty.collect(), &within).await);
        };
        let staged = staging.take(*device, group.length, deadline).await?;
        let mut host = Vec::with_capacity(group.blocks.len());
        let mut copies = Vec::with_capacity(group.blocks.len());
        for (block, from) in group.blocks.into_iter().zip(group.offsets) {
            let (pieces, length) = pieces(&block.buffers);
            let part = staged.part(from, length)?;
            copies.push(DeviceCopy {
                pieces,
                host: part.clone(),
            });
            host.push(PutBlock {
                key: block.key,
                parent: block.parent,
                buffers: vec![part],
            });
        }
        let copy = move |engine: &dyn CopyEngine, device| engine.copy_out(device, &copies);
        staged.copy(copy, deadline).await?;
        turn.comes().await;
        let options = PutOptions {
            timeout: Some(deadline.left()),
            ..options.clone()
        };
        Ok(self.batch_put(host, &options).await)
    }

    async fn get_group(
        &self,
        group: Group<GetBlock<GpuSlice>>,
        options: &GetOptions,
        deadline: Deadline,
    ) -> Result<Vec<Result<GetOutcome, GetError>>, NotStaged> {
        let Place::On(GpuBuffer {
            device, staging, ..
        }) = &group.place
        else {
            group.place.check()?;
            let empty = group.blocks.into_iter().map(|block| GetBlock {
                key: block.key,
                buffers: Vec::new(),
            });
            let within = GetOptions {
                timeout: Some(deadline.left()),
                ..options.clone()
            };
            return Ok(self.batch_get(empty.collect(), &within).await);
        };
        let staged = staging.take(*device, group.length, deadline).await?;
        let mut host = Vec::with_capacity(group.blocks.len());
        let mut targets = Vec::with_capacity(group.blocks.len());
        for (block, from) in group.blocks.into_iter().zip(group.offsets) {
            let (pieces, length) = pieces(&block.buffers);
            let part = staged.part(from, length)?;
            targets.push((pieces, part.clone()));
            host.push(GetBlock {
                key: block.key,
                buffers: vec![part],
            });
        }
        let within = GetOptions {
            timeout: Some(deadline.left()),
            ..options.clone()
        };
        let mut outcomes = self.batch_get(host, &within).await;
        let hits = outcomes
            .iter()
            .zip(targets)
            .filter_map(|(outcome, (pieces, part))| {
                let Ok(GetOutcome::Hit { length, .. }) = outcome else {
                    return None;
                };
                let host = part.slice(Offset(0), *length)?;
                Some(DeviceCopy { pieces, host })
            });
        let hits: Vec<DeviceCopy> = hits.collect();
        let copy = move |engine: &dyn CopyEngine, device| engine.copy_in(device, &hits);
        if let Err(NotStaged { code, message }) = staged.copy(copy, deadline).await {
            for outcome in &mut outcomes {
                if matches!(outcome, Ok(GetOutcome::Hit { .. })) {
                    let message = message.clone();
                    *outcome = Err(GetError::Failed { code, message });
                }
            }
        }
        Ok(outcomes)
    }
}

/// Blocks that are staged together, in one piece of staging memory.
struct Group<T> {
    place: Place,
    blocks: Vec<T>,
    /// The offset of each block's bytes in the staging memory.
    offsets: Vec<Offset>,
    length: Length,
}

/// The GPU that holds a block's buffers.
enum Place {
    /// The block has no buffers.
    Nowhere,
    /// One GPU. The value is one of the block's buffers.
    On(GpuBuffer),
    /// Several GPUs, which is an error.
    Several,
}

impl Place {
    fn of(slices: &[GpuSlice]) -> Self {
        let Some(first) = slices.first() else {
            return Self::Nowhere;
        };
        let mut others = slices.iter().map(|slice| slice.buffer.device);
        if others.all(|device| device == first.buffer.device) {
            Self::On(first.buffer.clone())
        } else {
            Self::Several
        }
    }

    /// Whether blocks on both GPUs can be staged together.
    fn goes_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::On(one), Self::On(other)) => one.device == other.device,
            (Self::Nowhere, Self::Nowhere) => true,
            _ => false,
        }
    }

    /// The approximate byte limit of a group for this GPU.
    fn limit(&self) -> u64 {
        match self {
            Self::On(buffer) => GROUP.min(buffer.staging.budget().0 / 4),
            Self::Nowhere | Self::Several => GROUP,
        }
    }

    fn check(&self) -> Result<(), NotStaged> {
        if matches!(self, Self::Several) {
            return Err(NotStaged {
                code: Code::InvalidArgument,
                message: "the buffers of one block are on several GPUs".to_owned(),
            });
        }
        Ok(())
    }
}

/// The order of a group's put among the groups of its batch.
#[derive(Default)]
struct Turn {
    /// Closes when the put of the previous group has ended. `None`: the put need not wait.
    ahead: Option<oneshot::Receiver<()>>,
    /// Closes when this turn is dropped.
    _ended: Option<oneshot::Sender<()>>,
}

impl Turn {
    /// Returns when the previous groups have ended.
    async fn comes(&mut self) {
        if let Some(ahead) = self.ahead.take() {
            // No value is sent; the channel closes.
            let _closed = ahead.await;
        }
    }
}

/// A turn for each group. If a block's parent, or another block of its key, is in another group, the groups are put
/// one after the other.
fn turns(groups: &[Group<PutBlock<GpuSlice>>]) -> Vec<Turn> {
    let blocks = groups.iter().enumerate().flat_map(|(number, group)| {
        let blocks = group.blocks.iter();
        blocks.map(move |block| (number, &block.key, block.parent.as_ref()))
    });
    if groups.len() < 2 || !order_matters(blocks) {
        return groups.iter().map(|_| Turn::default()).collect();
    }
    let mut last = None;
    let turn = |_| {
        let (ended, closed) = oneshot::channel();
        Turn {
            ahead: last.replace(closed),
            _ended: Some(ended),
        }
    };
    groups.iter().map(turn).collect()
}

/// The number of groups of one batch that are in work at a time: one is copied while another is transferred.
const AT_ONCE: usize = 3;
/// The approximate bytes of a group, if the staging memory has room for several groups. This size keeps a
/// copy engine and a network port at full speed.
const GROUP: u64 = 16 << 20;
/// The alignment of blocks in staging memory, in bytes.
const ALIGNMENT: u64 = 4096;

/// Splits a batch into groups, in order. Blocks that cannot be staged together, and faulty blocks, get groups
/// of their own.
fn groups<T>(blocks: Vec<T>, buffers: impl Fn(&T) -> &Vec<GpuSlice>) -> Vec<Group<T>> {
    let mut groups: Vec<Group<T>> = Vec::new();
    for block in blocks {
        let slices = buffers(&block);
        let place = Place::of(slices);
        let length: u64 = slices.iter().map(|slice| slice.length().0).sum();
        let joins = |group: &Group<T>| {
            group.place.goes_with(&place)
                && group.length.0.saturating_add(length) <= group.place.limit()
        };
        if !groups.last().is_some_and(joins) {
            groups.push(Group {
                place,
                blocks: Vec::new(),
                offsets: Vec::new(),
                length: Length(0),
            });
        }
        if let Some(group) = groups.last_mut() {
            group.offsets.push(Offset(group.length.0));
            let end = group.length.0.saturating_add(length);
            group.length = Length(end.next_multiple_of(ALIGNMENT));
            group.blocks.push(block);
        }
    }
    groups
}

/// Whether the buffers of a block share bytes.
fn is_overlapping(block: &GetBlock<GpuSlice>) -> bool {
    let slices = block.buffers.iter();
    block.buffers.len() > 1 && share_bytes(slices.map(|it| (it.range.address, it.length().0)))
}

/// The device ranges of a block, and their total length.
fn pieces(slices: &[GpuSlice]) -> (Vec<DeviceRange>, Length) {
    let length = slices.iter().map(|slice| slice.length().0).sum();
    let pieces = slices.iter().map(|slice| slice.range);
    (pieces.collect(), Length(length))
}

async fn in_turn<T, F: Future<Output = Vec<T>>>(groups: impl Iterator<Item = F>) -> Vec<T> {
    let outcomes = stream::iter(groups).buffered(AT_ONCE);
    outcomes.concat().await
}
