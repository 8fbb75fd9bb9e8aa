//! What shows that a session is of the life of a node that it names.
//!
//! ADR 0028 says why an incarnation is a hash.

use crate::Incarnation;
use sha2::{Digest, Sha256};
use std::fmt;

/// The bytes of a secret.
pub const INCARNATION_SECRET_BYTES: usize = 32;

/// Ends every incarnation that is the hash of a secret. Older nodes draw theirs at random, all 16 bytes:
/// one in 2^32 of those ends like this.
const MARK: [u8; 4] = *b"kvL1";

/// The secret of one life of a node. The life's [`Incarnation`] is its hash, so whoever knows the
/// incarnation, and every client does, cannot pass for the node. Nobody has to keep anything for it: a master
/// that has just begun checks it like any other.
#[derive(Clone, PartialEq, Eq)]
pub struct IncarnationSecret([u8; INCARNATION_SECRET_BYTES]);

impl fmt::Debug for IncarnationSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IncarnationSecret(..)")
    }
}

impl IncarnationSecret {
    /// The secret that `random` bytes make.
    pub const fn new(random: [u8; INCARNATION_SECRET_BYTES]) -> Self {
        Self(random)
    }

    /// The secret in `bytes`; `None` unless there are as many as it has.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        Some(Self(bytes.try_into().ok()?))
    }

    /// What a registration carries.
    pub const fn to_bytes(&self) -> [u8; INCARNATION_SECRET_BYTES] {
        self.0
    }

    /// The life that it is the secret of: 12 bytes of its hash, and a mark.
    pub fn incarnation(&self) -> Incarnation {
        let hash = Sha256::new()
            .chain_update(b"kvpool incarnation 1")
            .chain_update(self.0)
            .finalize();
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(hash.iter().take(12).chain(&MARK)) {
            *to = *from;
        }
        Incarnation(u128::from_le_bytes(bytes))
    }
}

impl Incarnation {
    /// Whether this life has a secret, which its sessions show.
    pub fn has_secret(self) -> bool {
        self.to_bytes().ends_with(&MARK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_is_the_hash_of_its_secret() {
        let secret = IncarnationSecret::new([7; 32]);
        let life = secret.incarnation();
        assert!(life.has_secret());
        assert_eq!(IncarnationSecret::from_slice(&[7; 32]), Some(secret));
        assert_ne!(IncarnationSecret::new([8; 32]).incarnation(), life);
        assert_eq!(IncarnationSecret::from_slice(&[7; 31]), None);
        assert!(!Incarnation(7).has_secret());
        // Nodes and masters of all versions agree on it.
        assert_eq!(life.to_string(), "314c766bb6e47e271007f2095d84dab9");
    }
}
