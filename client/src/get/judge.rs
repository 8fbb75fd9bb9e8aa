//! Decides whether the bytes in a get's buffers are the block's bytes.

use crate::cache::{Leased, Located};
use crate::clock::BootTime;
use kvpool_transport::{TransferError, TransferResult};
use kvpool_types::Code;

/// The verdict on a finished read.
pub(super) enum Judged {
    /// The buffers hold the block's bytes.
    Right,
    /// The lease ended before the read. The bytes may be those of another block.
    Outrun,
    /// The read failed, or its bytes differ from the block's under a valid lease.
    Wrong(TransferError),
}

/// Judges the read of `located` that ended at `ended`, under `lease`.
pub(super) fn judge(
    located: &Located,
    result: TransferResult,
    lease: Option<Leased>,
    ended: BootTime,
) -> Judged {
    let checksum = match result {
        Ok(checksum) => checksum,
        Err(error) => return Judged::Wrong(error),
    };
    let right = checksum == located.checksum;
    match lease {
        Some(lease) if !lease.runs(ended) => Judged::Outrun,
        // Without a lease the extent may hold another block by now. That is not a fault.
        None if !right => Judged::Outrun,
        _ if right => Judged::Right,
        _ => Judged::Wrong(TransferError {
            code: Code::ChecksumMismatch,
            message: format!(
                "checksum mismatch: the bytes read have {checksum}, the block has {}",
                located.checksum
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::{Checksum, Epoch, Length, Version};
    use std::time::Duration;

    fn located(lease: Option<Leased>) -> Located {
        Located {
            epoch: Epoch(1),
            version: Version(1),
            checksum: Checksum(7),
            length: Length(1),
            replicas: Vec::new(),
            lease,
        }
    }

    #[test]
    fn bytes_count_only_when_the_lease_outlived_the_read() {
        let begun = BootTime::now();
        let lease = Leased {
            token: 1,
            until: begun.after(Duration::from_secs(1)),
            ttl: Duration::from_secs(1),
            epoch: Epoch(1),
            newest: Version(1),
        };
        let at = |millis| begun.after(Duration::from_millis(millis));
        let located = located(Some(lease));
        let judge = |sum, lease, ended| judge(&located, Ok(Checksum(sum)), lease, ended);
        assert!(matches!(judge(7, Some(lease), at(999)), Judged::Right));
        assert!(matches!(judge(7, Some(lease), at(1000)), Judged::Outrun));
        assert!(matches!(judge(8, Some(lease), at(1000)), Judged::Outrun));
        assert!(matches!(
            judge(8, Some(lease), at(999)),
            Judged::Wrong(TransferError {
                code: Code::ChecksumMismatch,
                ..
            })
        ));
        assert!(matches!(judge(7, None, at(5000)), Judged::Right));
        assert!(matches!(judge(8, None, at(0)), Judged::Outrun));
    }
}
