//! Proves to a master that its pool has reached a later term.
//!
//! ADR 0028 says why a term needs a proof.

use crate::{ClusterId, Epoch, NodeName};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;

/// The length of a proof: HMAC-SHA-256, truncated to 16 bytes.
pub const TERM_PROOF_BYTES: usize = 16;

/// Creates and verifies proofs of a pool's terms. The reply to a registration carries a proof. A node shows
/// the proof to a master that leads an earlier term, for example on an old copy of its data. All masters of a
/// pool derive the same key from a secret in the pool's metadata.
#[derive(Clone)]
pub struct TermProver([u8; 32]);

impl fmt::Debug for TermProver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TermProver(..)")
    }
}

impl TermProver {
    /// The prover of the pool with this secret.
    pub fn new(cluster: ClusterId, secret: u64) -> Self {
        let key = Sha256::new()
            .chain_update(b"kvpool term proof 1")
            .chain_update(cluster.to_bytes())
            .chain_update(secret.to_le_bytes())
            .finalize();
        Self(key.into())
    }

    /// The proof that `node` was registered in `epoch`.
    pub fn prove(&self, node: &NodeName, epoch: Epoch) -> [u8; TERM_PROOF_BYTES] {
        let mac: [u8; 32] = self.mac(node, epoch).finalize().into_bytes().into();
        std::array::from_fn(|index| mac[index])
    }

    /// Whether `proof` is the proof for `node` and `epoch`. Takes constant time.
    pub fn verify(&self, node: &NodeName, epoch: Epoch, proof: &[u8]) -> bool {
        let is_whole = proof.len() == TERM_PROOF_BYTES;
        is_whole && self.mac(node, epoch).verify_truncated_left(proof).is_ok()
    }

    fn mac(&self, node: &NodeName, epoch: Epoch) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .expect("invariant: HMAC takes keys of any length");
        mac.update(&epoch.0.to_le_bytes());
        mac.update(node.0.as_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_bound_to_one_pool_one_node_and_one_term() {
        let node = |name: &str| NodeName(name.to_owned());
        let prover = TermProver::new(ClusterId(1), 2);
        let proof = prover.prove(&node("a"), Epoch(3));
        assert!(prover.verify(&node("a"), Epoch(3), &proof));
        assert!(!prover.verify(&node("b"), Epoch(3), &proof));
        assert!(!prover.verify(&node("a"), Epoch(4), &proof));
        assert!(!prover.verify(&node("a"), Epoch(3), &proof[..15]));
        assert!(!prover.verify(&node("a"), Epoch(3), &[]));
        for other in [
            TermProver::new(ClusterId(2), 2),
            TermProver::new(ClusterId(1), 3),
        ] {
            assert!(!other.verify(&node("a"), Epoch(3), &proof));
        }
    }
}
