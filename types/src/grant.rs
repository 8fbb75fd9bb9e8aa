//! The permission to write one extent, signed by the master, so that a node need not ask the
//! master.

use crate::{Epoch, Extent, GrantId, Incarnation};
use sha2::block_api::compress256;
use std::fmt;

/// The length of a grant's authentication code: HMAC-SHA-256, truncated to 16 bytes.
pub const MAC_BYTES: usize = 16;

/// The permission to write `extent` of one incarnation of one node, in one epoch, until the grant
/// is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The range to write, exactly as long as the block.
    pub extent: Extent,
    /// The term of the leader that signed it.
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
    /// The prepared signer of this key. Creating it costs as much as a signature, so keep it.
    pub fn signer(&self) -> GrantSigner {
        let pad = |byte: u8| {
            let mut block = [byte; BLOCK_BYTES];
            for (to, from) in block.iter_mut().zip(self.0) {
                *to ^= from;
            }
            let mut state = SHA256_START;
            compress256(&mut state, &[block]);
            state
        };
        GrantSigner {
            inner: pad(0x36),
            outer: pad(0x5c),
        }
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

const BLOCK_BYTES: usize = 64;

/// The initial state of SHA-256.
const SHA256_START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// A prepared [`GrantKey`]: the states of HMAC's two hashes after the key. A grant's fields fit one
/// block of each hash, so a signature costs two compressions and no copies.
#[derive(Clone)]
pub struct GrantSigner {
    inner: [u32; 8],
    outer: [u32; 8],
}

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
        Grant {
            extent,
            epoch,
            id,
            mac: self.mac(incarnation, epoch, id, extent),
        }
    }

    /// Whether `grant` was signed with this key for `incarnation`. Takes constant time.
    pub fn verify(&self, incarnation: Incarnation, grant: &Grant) -> bool {
        let mac = self.mac(incarnation, grant.epoch, grant.id, grant.extent);
        let differing = mac
            .iter()
            .zip(grant.mac)
            .fold(0, |bits, (right, given)| bits | (right ^ given));
        std::hint::black_box(differing) == 0
    }

    fn mac(
        &self,
        incarnation: Incarnation,
        epoch: Epoch,
        id: GrantId,
        extent: Extent,
    ) -> [u8; MAC_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        let parts: [&[u8]; 6] = [
            &incarnation.to_bytes(),
            &epoch.0.to_le_bytes(),
            &id.0.to_le_bytes(),
            &extent.segment.0.to_le_bytes(),
            &extent.offset.0.to_le_bytes(),
            &extent.length.0.to_le_bytes(),
        ];
        let mut at = 0;
        for part in parts {
            block[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        let digest = last_block(self.inner, block, at);
        let mut block = [0; BLOCK_BYTES];
        block[..digest.len()].copy_from_slice(&digest);
        let full = last_block(self.outer, block, digest.len());
        let (mac, _) = full.split_at(MAC_BYTES);
        mac.try_into().expect("invariant: a SHA-256 is longer")
    }
}

/// Finishes the hash that is in `state` after 64 bytes, with the first `len` (at most 55) bytes of
/// `block`. The other bytes of `block` are zero.
fn last_block(mut state: [u32; 8], mut block: [u8; BLOCK_BYTES], len: usize) -> [u8; 32] {
    const { assert!(BLOCK_BYTES == 64, "SHA-256 works on blocks of 64 bytes") };
    let bits = (BLOCK_BYTES + len) as u64 * 8;
    block[len] = 0x80;
    block[BLOCK_BYTES - 8..].copy_from_slice(&bits.to_be_bytes());
    compress256(&mut state, &[block]);
    let mut digest = [0; 32];
    for (to, word) in digest.chunks_exact_mut(4).zip(state) {
        to.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Length, Offset, SegmentId};
    use hmac::{Hmac, KeyInit, Mac};
    use proptest::prelude::*;
    use sha2::Sha256;

    /// The library's HMAC over the same bytes, written out separately.
    fn by_library(key: &GrantKey, life: u128, epoch: u64, id: u64, extent: Extent) -> Vec<u8> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&key.0).unwrap();
        mac.update(&life.to_le_bytes());
        mac.update(&epoch.to_le_bytes());
        mac.update(&id.to_le_bytes());
        mac.update(&extent.segment.0.to_le_bytes());
        mac.update(&extent.offset.0.to_le_bytes());
        mac.update(&extent.length.0.to_le_bytes());
        mac.finalize().into_bytes()[..MAC_BYTES].to_vec()
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
            prop_assert_eq!(grant.mac.to_vec(), by_library(&key, life, epoch, id, extent));
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
