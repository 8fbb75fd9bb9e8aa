//! The permission to write one extent. The master signs it, and the store node verifies it without asking the
//! master.

use crate::{Epoch, Extent, GrantId, Incarnation};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

/// The length of a grant's authentication code: HMAC-SHA-256, truncated to 16 bytes.
pub const MAC_BYTES: usize = 16;

/// The permission to write `extent` of one incarnation of one node. It is valid in one epoch, until the
/// extent is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The range to write, exactly as long as the block.
    pub extent: Extent,
    /// The epoch of the leader that signed the grant.
    pub epoch: Epoch,
    /// The id, unique within the epoch.
    pub id: GrantId,
    /// The signature, under the key that the master shares with the node.
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
    /// A signer with this key. Its creation costs as much as a signature, so keep it.
    pub fn signer(&self) -> GrantSigner {
        let keyed =
            Hmac::new_from_slice(&self.0).expect("invariant: HMAC takes keys of any length");
        GrantSigner(keyed)
    }

    /// Signs the permission of grant `id` to write `extent` of `incarnation` in `epoch`.
    pub fn sign(
        &self,
        incarnation: Incarnation,
        epoch: Epoch,
        id: GrantId,
        extent: Extent,
    ) -> Grant {
        self.signer().sign(incarnation, epoch, id, extent)
    }

    /// Whether `grant` was signed with this key for `incarnation`. Takes constant time.
    pub fn verify(&self, incarnation: Incarnation, grant: &Grant) -> bool {
        self.signer().verify(incarnation, grant)
    }
}

/// A [`GrantKey`] in the form that signs: the state of HMAC-SHA-256 after the key. A signature then does not
/// hash the key again.
#[derive(Clone)]
pub struct GrantSigner(pub(crate) Hmac<Sha256>);

impl fmt::Debug for GrantSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantSigner(..)")
    }
}

impl GrantSigner {
    /// Signs the permission of grant `id` to write `extent` of `incarnation` in `epoch`.
    pub fn sign(
        &self,
        incarnation: Incarnation,
        epoch: Epoch,
        id: GrantId,
        extent: Extent,
    ) -> Grant {
        let full: [u8; 32] = self
            .mac(incarnation, epoch, id, extent)
            .finalize()
            .into_bytes()
            .into();
        Grant {
            extent,
            epoch,
            id,
            mac: std::array::from_fn(|index| full[index]),
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
        let mut mac = self.0.clone();
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
    use proptest::prelude::*;
    use sha2::Digest;

    /// The signature by the definition of HMAC (RFC 2104), from the hash alone.
    fn by_definition(key: &GrantKey, life: u128, epoch: u64, id: u64, extent: Extent) -> Vec<u8> {
        let padded = |pad: u8| {
            let mut block = [pad; 64];
            for (to, from) in block.iter_mut().zip(key.0) {
                *to ^= from;
            }
            Sha256::new().chain_update(block)
        };
        let inner = padded(0x36)
            .chain_update(life.to_le_bytes())
            .chain_update(epoch.to_le_bytes())
            .chain_update(id.to_le_bytes())
            .chain_update(extent.segment.0.to_le_bytes())
            .chain_update(extent.offset.0.to_le_bytes())
            .chain_update(extent.length.0.to_le_bytes())
            .finalize();
        padded(0x5c).chain_update(inner).finalize()[..MAC_BYTES].to_vec()
    }

    proptest! {
        #[test]
        fn a_grant_is_signed_with_hmac_sha_256(
            key: [u8; 32], life: u128, epoch: u64, id: u64,
            segment: u32, offset: u64, length: u64,
        ) {
            let extent = Extent {
                segment: SegmentId(segment),
                offset: Offset(offset),
                length: Length(length),
            };
            let key = GrantKey(key);
            let grant = key.signer().sign(Incarnation(life), Epoch(epoch), GrantId(id), extent);
            prop_assert_eq!(grant.mac.to_vec(), by_definition(&key, life, epoch, id, extent));
            prop_assert!(key.verify(Incarnation(life), &grant));
            for byte in 0..MAC_BYTES {
                let mut other = grant;
                other.mac[byte] ^= 1;
                prop_assert!(!key.verify(Incarnation(life), &other));
            }
        }
    }

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
