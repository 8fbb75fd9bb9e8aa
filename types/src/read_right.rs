//! The permission to read one extent. The master signs it, and the store node verifies it without asking the
//! master.

use crate::grant::{GrantSigner, MAC_BYTES};
use crate::{Epoch, Extent, Incarnation, Version};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;

/// The prefix of the signed bytes. No signed grant has this prefix. The prefix, the incarnation and the epoch
/// fill one block of SHA-256, which a [`ReadSigner`] hashes once.
const TAG: [u8; 40] = *b"kvpool: the permission to read an extent";

/// The permission to read one extent of one incarnation of one node. It is valid in one epoch, while the
/// extent holds `version`. The request carries the extent and the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRight {
    /// The version of the block in the extent.
    pub version: Version,
    /// When the permission ends, in milliseconds on the clock of the master that signed it.
    pub deadline_ms: u64,
    /// The signature, under the key that the master shares with the node.
    pub mac: [u8; MAC_BYTES],
}

/// A signer of read permissions for one incarnation in one epoch.
#[derive(Clone)]
pub struct ReadSigner(Hmac<Sha256>);

impl fmt::Debug for ReadSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadSigner(..)")
    }
}

impl GrantSigner {
    /// A signer of read permissions for `incarnation` in `epoch`, with this key. Its creation costs about
    /// half a signature.
    pub fn for_reads(&self, incarnation: Incarnation, epoch: Epoch) -> ReadSigner {
        let mut mac = self.0.clone();
        mac.update(&TAG);
        mac.update(&incarnation.to_bytes());
        mac.update(&epoch.0.to_le_bytes());
        ReadSigner(mac)
    }
}

impl ReadSigner {
    /// Signs the permission to read `extent` while it holds `version`, until `deadline_ms` on the
    /// master's clock.
    pub fn sign(&self, extent: Extent, version: Version, deadline_ms: u64) -> ReadRight {
        let mac = self.mac(extent, version, deadline_ms);
        let full: [u8; 32] = mac.finalize().into_bytes().into();
        ReadRight {
            version,
            deadline_ms,
            mac: std::array::from_fn(|index| full[index]),
        }
    }

    /// Whether `right` was signed with this key for `extent`, in constant time. The caller checks version and
    /// deadline.
    pub fn verify(&self, extent: Extent, right: &ReadRight) -> bool {
        self.mac(extent, right.version, right.deadline_ms)
            .verify_truncated_left(&right.mac)
            .is_ok()
    }

    fn mac(&self, extent: Extent, version: Version, deadline_ms: u64) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&extent.segment.0.to_le_bytes());
        mac.update(&extent.offset.0.to_le_bytes());
        mac.update(&extent.length.0.to_le_bytes());
        mac.update(&version.0.to_le_bytes());
        mac.update(&deadline_ms.to_le_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GrantKey, Length, Offset, SegmentId};
    use proptest::prelude::*;
    use sha2::Digest;

    fn extent(segment: u32, offset: u64, length: u64) -> Extent {
        Extent {
            segment: SegmentId(segment),
            offset: Offset(offset),
            length: Length(length),
        }
    }

    /// HMAC by its definition (RFC 2104), from the hash alone.
    fn by_definition(key: &GrantKey, message: &[u8]) -> Vec<u8> {
        let padded = |pad: u8| {
            let mut block = [pad; 64];
            for (to, from) in block.iter_mut().zip(key.0) {
                *to ^= from;
            }
            Sha256::new().chain_update(block)
        };
        let inner = padded(0x36).chain_update(message).finalize();
        padded(0x5c).chain_update(inner).finalize()[..MAC_BYTES].to_vec()
    }

    proptest! {
        #[test]
        fn a_read_is_signed_with_hmac_sha_256(
            key: [u8; 32], life: u128, epoch: u64, segment: u32, offset: u64, length: u64,
            version: u64, deadline: u64,
        ) {
            let key = GrantKey(key);
            let signer = key.signer().for_reads(Incarnation(life), Epoch(epoch));
            let place = extent(segment, offset, length);
            let right = signer.sign(place, Version(version), deadline);
            let mut message = b"kvpool: the permission to read an extent".to_vec();
            message.extend(life.to_le_bytes());
            message.extend(epoch.to_le_bytes());
            message.extend(segment.to_le_bytes());
            for field in [offset, length, version, deadline] {
                message.extend(field.to_le_bytes());
            }
            prop_assert_eq!(right.mac.to_vec(), by_definition(&key, &message));
            prop_assert!(signer.verify(place, &right));
            for byte in 0..MAC_BYTES {
                let mut other = right;
                other.mac[byte] ^= 1;
                prop_assert!(!signer.verify(place, &other));
            }
        }
    }

    #[test]
    fn a_right_is_bound_to_every_field() {
        let key = GrantKey([7; 32]);
        let of = |key: &GrantKey, life, epoch| {
            let signer = key.signer();
            signer.for_reads(Incarnation(life), Epoch(epoch))
        };
        let signer = of(&key, 9, 2);
        let place = extent(1, 4096, 100);
        let right = signer.sign(place, Version(5), 1000);
        assert!(signer.verify(place, &right));
        for other in [of(&key, 8, 2), of(&key, 9, 3), of(&GrantKey([8; 32]), 9, 2)] {
            assert!(!other.verify(place, &right));
        }
        for other in [extent(2, 4096, 100), extent(1, 0, 100), extent(1, 4096, 99)] {
            assert!(!signer.verify(other, &right));
        }
        let later = ReadRight {
            deadline_ms: 1001,
            ..right
        };
        let newer = ReadRight {
            version: Version(6),
            ..right
        };
        assert!(!signer.verify(place, &later) && !signer.verify(place, &newer));
    }
}
