//! Pinned host memory through which the blocks of GPUs pass. It is bounded and reused.

use crate::clock::Deadline;
use kvpool_transport::gpu::{CopyEngine, Device, GpuError};
use kvpool_transport::rdma::{Fabric, RegisteredBuffer};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Code, Length, Offset};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The unit of the budget, in bytes.
const PAGE: u64 = 4096;
/// The smallest piece in bytes. Allocation of pinned memory is slow, so smaller pieces are not worth it.
const SMALLEST: u64 = 1 << 20;

/// The staging memory of a client.
#[derive(Debug)]
pub(crate) struct Staging {
    engine: Arc<dyn CopyEngine>,
    budget: Length,
    /// The unused part of the budget, in units of [`PAGE`].
    room: Arc<Semaphore>,
    pieces: Mutex<Pieces>,
    /// The RDMA ports. Each piece is registered with them once.
    fabric: Option<Arc<Fabric>>,
}

#[derive(Debug, Default)]
struct Pieces {
    /// The pieces that are not in use.
    idle: Vec<Piece>,
    /// The total length of all pieces in bytes.
    allocated: u64,
}

#[derive(Debug)]
struct Piece {
    memory: Region,
    _with_ports: RegisteredBuffer,
}

/// A piece in use by its taker, by copies, or by transfers. Transfers may outlive the call that made them.
pub(super) struct Staged {
    taken: Arc<Taken>,
}

/// Shared by all users of a piece. The drop of the last one returns the piece to the idle pieces.
struct Taken {
    piece: Option<Piece>,
    device: Device,
    staging: Arc<Staging>,
    _room: OwnedSemaphorePermit,
}

/// Why blocks were not staged.
#[derive(Clone, Debug)]
pub(super) struct NotStaged {
    pub(super) code: Code,
    pub(super) message: String,
}

impl Staging {
    /// Staging memory of which at most `budget` bytes are in use at a time.
    pub(crate) fn new(
        engine: Arc<dyn CopyEngine>,
        budget: Length,
        fabric: Option<Arc<Fabric>>,
    ) -> Self {
        let pages = usize::try_from(budget.0 / PAGE).unwrap_or(usize::MAX);
        Self {
            engine,
            budget,
            room: Arc::new(Semaphore::new(pages.min(Semaphore::MAX_PERMITS))),
            pieces: Mutex::default(),
            fabric,
        }
    }

    /// The most bytes that are in use at a time.
    pub(super) const fn budget(&self) -> Length {
        self.budget
    }

    /// Takes a piece of at least `length` bytes. Waits until `deadline` for other users to return pieces.
    pub(super) async fn take(
        self: &Arc<Self>,
        device: Device,
        length: Length,
        deadline: Deadline,
    ) -> Result<Staged, NotStaged> {
        let wanted = length.0.max(SMALLEST).checked_next_power_of_two();
        // A block over half the budget is not rounded up beyond the budget.
        let wanted = wanted.unwrap_or(u64::MAX).min(self.budget.0.max(length.0));
        let pages = u32::try_from(wanted.div_ceil(PAGE)).unwrap_or(u32::MAX);
        if wanted > self.budget.0 {
            return Err(NotStaged {
                code: Code::TooLarge,
                message: format!(
                    "a block of {length} bytes exceeds the GPU staging memory, {}",
                    self.budget
                ),
            });
        }
        let waiting = Arc::clone(&self.room).acquire_many_owned(pages);
        let room = deadline.run(waiting).await.map_err(|_| NotStaged {
            code: Code::DeadlineExceeded,
            message: "no GPU staging memory became free in time".to_owned(),
        })?;
        let Ok(room) = room else {
            unreachable!("invariant: the semaphore is never closed")
        };
        let staging = Arc::clone(self);
        let taken = move |piece| Taken {
            piece: Some(piece),
            device,
            staging,
            _room: room,
        };
        let found = self.pieces.lock().find(wanted);
        let taken = match found {
            Some(piece) => taken(piece),
            None => {
                let staging = Arc::clone(self);
                // If the caller has left meanwhile, the result is dropped. So the piece becomes idle, and
                // then its permits return.
                let allocate = move || staging.allocate(device, wanted).map(taken);
                let allocated = tokio::task::spawn_blocking(allocate).await;
                allocated.unwrap_or_else(|error| Err(panicked(&error)))?
            }
        };
        Ok(Staged {
            taken: Arc::new(taken),
        })
    }

    fn allocate(&self, device: Device, length: u64) -> Result<Piece, NotStaged> {
        // The caller holds permits for the new piece, so it is enough to drop idle pieces.
        let dropped = self.pieces.lock().reserve(length, self.budget.0);
        drop(dropped);
        let allocated = self.allocate_now(device, Length(length));
        if allocated.is_err() {
            let mut pieces = self.pieces.lock();
            debug_assert!(pieces.allocated >= length);
            pieces.allocated -= length;
        }
        allocated
    }

    fn allocate_now(&self, device: Device, length: Length) -> Result<Piece, NotStaged> {
        let memory = self.engine.pinned(device, length)?;
        let registered = self.fabric.as_ref().map(|fabric| {
            let registered = fabric.register_buffer(&memory.whole());
            registered.map_err(|error| NotStaged {
                code: Code::Internal,
                message: format!("cannot register GPU staging memory for RDMA: {error}"),
            })
        });
        Ok(Piece {
            memory,
            _with_ports: registered.transpose()?.unwrap_or_default(),
        })
    }
}

impl Pieces {
    /// An idle piece of exactly this length, for which the taker holds permits.
    fn find(&mut self, length: u64) -> Option<Piece> {
        let fits = |piece: &Piece| piece.memory.length().0 == length;
        let at = self.idle.iter().position(fits)?;
        Some(self.idle.swap_remove(at))
    }

    /// Counts a new piece. Returns the idle pieces that must be freed to stay within the budget.
    fn reserve(&mut self, length: u64, budget: u64) -> Vec<Piece> {
        let mut dropped = Vec::new();
        while self.allocated + length > budget
            && let Some(piece) = self.idle.pop()
        {
            debug_assert!(self.allocated >= piece.memory.length().0);
            self.allocated -= piece.memory.length().0;
            dropped.push(piece);
        }
        self.allocated += length;
        // All pieces in use, and the new one, hold permits of the budget.
        debug_assert!(
            self.allocated <= budget,
            "{} bytes of a staging budget of {budget}",
            self.allocated
        );
        dropped
    }
}

impl Staged {
    /// A part of the piece. The piece stays in use as long as the part exists.
    pub(super) fn part(&self, from: Offset, length: Length) -> Result<Slice, NotStaged> {
        let memory = self.taken.piece.as_ref().map(|piece| &piece.memory);
        let part = memory.and_then(|memory| memory.slice(from, length));
        let Some(part) = part else {
            unreachable!("invariant: a group's blocks lie inside its length")
        };
        Ok(part.with_hook(Arc::clone(&self.taken) as Arc<_>))
    }

    /// Runs `copy` on a thread for blocking work, unless the deadline has passed, and awaits its end. After
    /// the return, nothing touches the caller's memory.
    pub(super) async fn copy(
        &self,
        copy: impl FnOnce(&dyn CopyEngine, Device) -> Result<(), GpuError> + Send + 'static,
        deadline: Deadline,
    ) -> Result<(), NotStaged> {
        let taken = Arc::clone(&self.taken);
        let work = move || {
            if deadline.has_passed() {
                return Err(NotStaged {
                    code: Code::DeadlineExceeded,
                    message: "the deadline passed before the GPU copy began".to_owned(),
                });
            }
            copy(&*taken.staging.engine, taken.device).map_err(NotStaged::from)
        };
        let copied = tokio::task::spawn_blocking(work).await;
        copied.unwrap_or_else(|error| Err(panicked(&error)))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.staging.pieces.lock().idle.push(piece);
        }
    }
}

impl From<GpuError> for NotStaged {
    fn from(error: GpuError) -> Self {
        let code = match &error {
            GpuError::NotDeviceMemory(_) => Code::InvalidArgument,
            _ => Code::Internal,
        };
        Self {
            code,
            message: error.to_string(),
        }
    }
}

fn panicked(error: &tokio::task::JoinError) -> NotStaged {
    NotStaged {
        code: Code::Internal,
        message: format!("a GPU copy failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_transport::gpu::DeviceCopy;
    use std::time::Duration;

    /// An engine whose host memory is not pinned, and which copies nothing.
    #[derive(Debug, Default)]
    struct Heap {
        /// How long it takes to pin memory.
        pause: Duration,
    }

    impl CopyEngine for Heap {
        fn device_at(&self, _: u64) -> Option<Device> {
            None
        }

        fn pinned(&self, _: Device, length: Length) -> Result<Region, GpuError> {
            std::thread::sleep(self.pause);
            Ok(Region::allocate(length))
        }

        fn copy_out(&self, _: Device, copies: &[DeviceCopy]) -> Result<(), GpuError> {
            Err(GpuError::NotDeviceMemory(copies[0].pieces[0]))
        }

        fn copy_in(&self, _: Device, copies: &[DeviceCopy]) -> Result<(), GpuError> {
            Err(GpuError::NotDeviceMemory(copies[0].pieces[0]))
        }
    }

    #[tokio::test]
    async fn a_piece_goes_back_only_when_no_transfer_holds_a_part_of_it() {
        let staging = Arc::new(Staging::new(
            Arc::new(Heap::default()),
            Length(SMALLEST),
            None,
        ));
        let take = async |patience| {
            let deadline = Deadline::after(Duration::from_millis(patience));
            staging.take(Device(0), Length(100), deadline).await
        };
        let staged = take(1000).await.unwrap();
        let part = staged.part(Offset(0), Length(100)).unwrap();
        let address = part.as_ptr();
        // The call has ended, but a transfer that it began has not.
        drop(staged);
        let refused = take(50).await.err().unwrap();
        assert_eq!(refused.code, Code::DeadlineExceeded);
        drop(part);
        let again = take(1000).await.unwrap();
        let part = again.part(Offset(0), Length(100)).unwrap();
        assert_eq!(part.as_ptr(), address, "the same memory is used again");
    }

    #[tokio::test]
    async fn a_piece_whose_taker_is_gone_is_used_again() {
        let slow = Heap {
            pause: Duration::from_millis(100),
        };
        let staging = Arc::new(Staging::new(Arc::new(slow), Length(8 * SMALLEST), None));
        let take = async || {
            let deadline = Deadline::after(Duration::from_secs(10));
            staging.take(Device(0), Length(100), deadline).await
        };
        for _ in 0..5 {
            drop(tokio::time::timeout(Duration::from_millis(20), take()).await);
        }
        // When the last piece is returned, all of the budget is free.
        let all = u32::try_from(8 * SMALLEST / PAGE).unwrap();
        drop(staging.room.acquire_many(all).await.unwrap());
        let idle = || {
            let pieces = staging.pieces.lock();
            let lengths = pieces.idle.iter().map(|piece| piece.memory.length().0);
            (lengths.sum::<u64>(), pieces.allocated)
        };
        let (before, allocated) = idle();
        assert!(before > 0);
        assert_eq!(before, allocated, "all that was pinned is there for others");
        for _ in 0..2 {
            drop(take().await.unwrap());
        }
        assert_eq!(idle(), (before, allocated));
    }

    #[tokio::test]
    async fn no_more_is_pinned_than_the_budget_whatever_was_used_before() {
        let staging = Arc::new(Staging::new(
            Arc::new(Heap::default()),
            Length(2 * SMALLEST),
            None,
        ));
        let take = async |length| {
            let deadline = Deadline::after(Duration::from_secs(10));
            staging.take(Device(0), Length(length), deadline).await
        };
        drop(take(2 * SMALLEST).await.unwrap());
        let _both = [take(SMALLEST).await.unwrap(), take(SMALLEST).await.unwrap()];
        assert_eq!(staging.pieces.lock().allocated, 2 * SMALLEST);
    }
}
