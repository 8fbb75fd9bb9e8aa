//! The secret shared by a group of processes, and the values derived from it.

use hmac::{Hmac, KeyInit, Mac};
use kvpool_types::{ClientId, GrantKey, Incarnation};
use sha2::Sha256;
use std::fmt;
use std::fmt::Write as _;

/// Proves that a process may access another's memory. Without a secret, every process that reaches the port
/// may access it.
///
/// The secret is never sent: a hello carries a MAC over the connecting client's id. An eavesdropper
/// can replay that hello and a signed write, but cannot sign a write of another range.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_none() {
            "Secret(none)"
        } else {
            "Secret(..)"
        })
    }
}

impl Secret {
    /// A secret; an empty one means none.
    pub fn new(secret: impl Into<Vec<u8>>) -> Self {
        Self(secret.into())
    }

    /// Whether there is no secret.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The hello token of a client.
    pub fn proof(&self, client: ClientId) -> String {
        if self.is_none() {
            return String::new();
        }
        let mut proof = String::new();
        for byte in self.code(b"kvpool peer hello", &client.to_bytes()) {
            write!(proof, "{byte:02x}").expect("invariant: a string takes what is written");
        }
        proof
    }

    /// Whether `proof` was derived from the same secret. Compares in constant time.
    pub(super) fn accepts(&self, client: ClientId, proof: &str) -> bool {
        let right = self.proof(client);
        let differing = right
            .bytes()
            .zip(proof.bytes())
            .fold(0, |bits, (right, given)| bits | (right ^ given));
        right.len() == proof.len() && std::hint::black_box(differing) == 0
    }

    /// The key that signs writes into one session's memory.
    pub fn grant_key(&self, session: Incarnation) -> GrantKey {
        GrantKey(self.code(b"kvpool peer write", &session.to_bytes()))
    }

    /// The key of the letters from one session to another.
    pub(super) fn letter_key(&self, from: Incarnation, to: Incarnation) -> [u8; 32] {
        let both = [from.to_bytes(), to.to_bytes()].concat();
        self.code(b"kvpool peer letter", &both)
    }

    fn code(&self, purpose: &[u8], id: &[u8]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .expect("invariant: HMAC takes keys of any length");
        mac.update(purpose);
        mac.update(id);
        mac.finalize().into_bytes().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_bound_to_the_secret_and_the_client() {
        let (secret, other) = (Secret::new("s"), Secret::new("t"));
        let proof = secret.proof(ClientId(1));
        assert!(secret.accepts(ClientId(1), &proof));
        assert!(!secret.accepts(ClientId(2), &proof));
        assert!(!other.accepts(ClientId(1), &proof));
        assert!(!secret.accepts(ClientId(1), ""));
        assert!(Secret::default().accepts(ClientId(1), ""));
        assert!(!Secret::default().accepts(ClientId(1), &proof));
    }
}
