//! Views: blocks that are read in place, in the memory of a node on the same host.

use crate::api::ViewOptions;
use crate::clock::{BootTime, Deadline};
use crate::context::ClientContext;
use crate::counters::Counting;
use crate::errors::GetError;
use crate::replica_retry::ReplicaRetry;
use kvpool_transport::checksum::sum_shared;
use kvpool_transport::{Slice, TransferError, TransportKind};
use kvpool_types::{Code, Key, Length, Offset, Version};

/// A block that the caller reads in place, without a copy. The node does not reuse the extent while the view
/// or a clone of it exists, even after the lease has expired. Drop a view soon, so that the node can reuse
/// its extent.
#[derive(Clone, Debug)]
pub struct View {
    memory: Slice,
    version: Version,
}

impl View {
    /// The block's length in bytes.
    pub fn length(&self) -> Length {
        self.memory.length()
    }

    /// The version of the block.
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Copies the bytes from offset `from` into `out`. Panics unless the range lies inside the block.
    pub fn read_at(&self, from: Offset, out: &mut [u8]) {
        self.memory.read_at(from, out);
    }

    /// Copies all bytes out.
    pub fn to_vec(&self) -> Vec<u8> {
        self.memory.to_vec()
    }

    /// The block's memory, read-only. A clone of the slice keeps the view alive.
    pub const fn memory(&self) -> &Slice {
        &self.memory
    }
}

/// Takes a view of `key`; `None` when the block is absent.
pub(crate) async fn get_view(
    inner: &ClientContext,
    key: &Key,
    options: &ViewOptions,
) -> Result<Option<View>, GetError> {
    let timeout = options.timeout.unwrap_or(inner.options.timeouts.get);
    let deadline = Deadline::after(timeout);
    let mut retry = ReplicaRetry::new(inner, key, deadline, Some(TransportKind::Shm));
    loop {
        let Some(target) = retry.next(Length(0)).await? else {
            Counting::one(&inner.counting.misses);
            return Ok(None);
        };
        let Some(lease) = target.located.lease else {
            // A leader that is read-only gives no lease. Without a lease the pin could come after the extent
            // was freed.
            return Err(GetError::Failed {
                code: Code::NotLeader,
                message: "the master is read-only and gives no leases; a view needs a lease"
                    .to_owned(),
            });
        };
        let replica = target.choice.replica.clone();
        let pinned = match inner
            .links
            .first(&replica.node, &target.choice.ways, target.limit)
            .await
        {
            Ok(link) => match link.pin_now(target.located.epoch, replica.extent) {
                Some(memory) => Ok(memory),
                None => {
                    let limit = target.limit;
                    let pinning = link.pin(target.located.epoch, replica.extent, limit.to_std());
                    match limit.with_grace().run(pinning).await {
                        Ok(pinned) => pinned,
                        Err(_) => Err(late(&replica.node.name)),
                    }
                }
            },
            Err(error) => Err(error),
        };
        // The lease must still run after the pin is in place. Otherwise the master may have freed the extent
        // before the pin.
        let in_time = lease.runs(BootTime::now());
        let memory = match pinned {
            Ok(memory) if in_time => memory,
            Ok(_) => {
                retry.lease_outrun();
                continue;
            }
            Err(error) => {
                retry.fail(&target, &[TransportKind::Shm], error);
                continue;
            }
        };
        if !options.unverified {
            let shared = memory.clone();
            // Summing megabytes must not block a thread on which other tasks wait.
            let summed = kvpool_seams::blocking(move || sum_shared(&shared).whole);
            let summed = match deadline.run(summed).await {
                Ok(Ok(sum)) => sum,
                _ => {
                    retry.fail(&target, &[TransportKind::Shm], late(&replica.node.name));
                    continue;
                }
            };
            if summed != target.located.checksum {
                let error = TransferError {
                    code: Code::ChecksumMismatch,
                    message: format!(
                        "checksum mismatch: the pinned bytes have {summed}, the block has {}",
                        target.located.checksum
                    ),
                };
                retry.fail(&target, &[TransportKind::Shm], error);
                continue;
            }
            inner
                .counting
                .read(TransportKind::Shm, target.located.length.0);
        }
        Counting::one(&inner.counting.hits);
        Counting::one(&inner.counting.views);
        // From here on the pin keeps the bytes.
        retry.pinned(&target);
        retry.done();
        return Ok(Some(View {
            memory,
            version: target.located.version,
        }));
    }
}

fn late(node: &kvpool_types::NodeName) -> TransferError {
    TransferError {
        code: Code::DeadlineExceeded,
        message: format!("the view on node {node} timed out"),
    }
}
