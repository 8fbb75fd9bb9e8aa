//! The right to write one extent, signed by the master so that a node need not ask it.

use crate::{Epoch, Extent, GrantId, Incarnation};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

/// The bytes of a grant's authentication code: HMAC-SHA-256, cut to its first 16 bytes.
pub const MAC_BYTES: usize = 16;

/// The right to write `extent` of one incarnation of one node, in one epoch, until it is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The range that may be written: exactly as long as the block.
    pub extent: Extent,
    /// The term of the leader that gave it.
    pub epoch: Epoch,
    /// Its number, unique within the epoch.
    pub id: GrantId,
    /// What proves it, under the key that the master shares with the node.
    pub mac: [u8; MAC_BYTES],
}

/// The secret that one master term shares with one node incarnation.
#[derive(Clone, PartialEq, Eq)]
pub struct GrantKey(pub [u8; 32]);

impl fmt::Debug for GrantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantKey(..)")
    }
}

impl GrantKey {
    /// Signs the right of `id` to write `extent` of `incarnation` in `epoch`.
    pub fn sign(
        &self,
        incarnation: Incarnation,
        epoch: Epoch,
        id: GrantId,
        extent: Extent,
    ) -> Grant {
        let mut mac = [0; MAC_BYTES];
        let full = self
            .mac(incarnation, epoch, id, extent)
            .finalize()
            .into_bytes();
        mac.copy_from_slice(&full[..MAC_BYTES]);
        Grant {
            extent,
            epoch,
            id,
            mac,
        }
    }

    /// Whether `grant` was signed with this key for `incarnation`. Takes constant time.
    pub fn verify(&self, incarnation: Incarnation, grant: &Grant) -> bool {
        self.mac(incarnation, grant.epoch, grant.id, grant.extent)
            .verify_truncated_left(&grant.mac)
            .is_ok()
    }

    fn mac(
        &self,
        incarnation: Incarnation,
        epoch: Epoch,
        id: GrantId,
        extent: Extent,
    ) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .expect("invariant: HMAC takes keys of any length");
        mac.update(&incarnation.to_bytes());
        mac.update(&epoch.0.to_le_bytes());
        mac.update(&id.0.to_le_bytes());
        mac.update(&extent.segment.0.to_le_bytes());
        mac.update(&extent.offset.0.to_le_bytes());
        mac.update(&extent.length.0.to_le_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Length, Offset, SegmentId};

    #[test]
    fn a_grant_is_bound_to_every_field() {
        let key = GrantKey([7; 32]);
        let extent = Extent {
            segment: SegmentId(1),
            offset: Offset(4096),
            length: Length(100),
        };
        let grant = key.sign(Incarnation(9), Epoch(2), GrantId(5), extent);
        assert!(key.verify(Incarnation(9), &grant));
        assert!(!key.verify(Incarnation(8), &grant));
        assert!(!GrantKey([8; 32]).verify(Incarnation(9), &grant));
        assert!(!key.verify(
            Incarnation(9),
            &Grant {
                epoch: Epoch(3),
                ..grant
            }
        ));
        assert!(!key.verify(
            Incarnation(9),
            &Grant {
                id: GrantId(6),
                ..grant
            }
        ));
        for extent in [
            Extent {
                segment: SegmentId(2),
                ..extent
            },
            Extent {
                offset: Offset(0),
                ..extent
            },
            Extent {
                length: Length(101),
                ..extent
            },
        ] {
            assert!(!key.verify(Incarnation(9), &Grant { extent, ..grant }));
        }
    }
}
