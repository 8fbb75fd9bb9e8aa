//! Proves that a session belongs to the incarnation that it names.
//!
//! ADR 0028 says why an incarnation is a hash.

use crate::Incarnation;
use sha2::{Digest, Sha256};
use std::fmt;

/// The length of a secret, in bytes.
pub const INCARNATION_SECRET_BYTES: usize = 32;

/// The last bytes of every incarnation that is the hash of a secret. Older nodes draw all 16 bytes at random,
/// so one in 2^32 of their incarnations ends like this too.
const MARK: [u8; 4] = *b"kvL1";

/// The secret of one incarnation. The [`Incarnation`] is the hash of the secret. Every client knows the
/// incarnation, but only the node knows the secret, so a client cannot impersonate the node. The master
/// stores nothing for the check, so every later leader can do it.
#[derive(Clone, PartialEq, Eq)]
pub struct IncarnationSecret([u8; INCARNATION_SECRET_BYTES]);

impl fmt::Debug for IncarnationSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IncarnationSecret(..)")
    }
}

impl IncarnationSecret {
    /// A secret of random bytes.
    pub const fn new(random: [u8; INCARNATION_SECRET_BYTES]) -> Self {
        Self(random)
    }

    /// Reads a secret; `None` for another length.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        Some(Self(bytes.try_into().ok()?))
    }

    /// The bytes that a registration carries.
    pub const fn to_bytes(&self) -> [u8; INCARNATION_SECRET_BYTES] {
        self.0
    }

    /// The incarnation of this secret: 12 bytes of its hash, and a mark.
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
    /// Whether this incarnation has a secret, which its sessions must send.
    pub fn has_secret(self) -> bool {
        self.to_bytes().ends_with(&MARK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_is_the_hash_of_its_secret() {
        let secret = IncarnationSecret::new([7; 32]);
        let life = secret.incarnation();
        assert!(life.has_secret());
        assert_eq!(IncarnationSecret::from_slice(&[7; 32]), Some(secret));
        assert_ne!(IncarnationSecret::new([8; 32]).incarnation(), life);
        assert_eq!(IncarnationSecret::from_slice(&[7; 31]), None);
        assert!(!Incarnation(7).has_secret());
        // Nodes and masters of all versions agree on this value.
        assert_eq!(life.to_string(), "314c766bb6e47e271007f2095d84dab9");
    }
}
