//! Checks of a registration before it has any effect. They compare its fields with the possible
//! values, with the known incarnation, and with the pool's terms. Without tokens or certificates a
//! node does not prove its identity.

use super::Pool;
use super::nodes::{RegisterError, refuse};
use crate::membership::{NodeState, Registration, StoreNode};
use bytes::Bytes;
use kvpool_types::{Code, NodeName, TermProver};

/// The most nodes of a pool.
const MOST_NODES: usize = 16_384;
/// The most segments of a node.
const MOST_SEGMENTS: usize = 1024;
/// The most bytes of a node: one process cannot map more on the machines that kvpool supports.
const MOST_BYTES: u64 = 1 << 47;
/// The longest `host:port`: a DNS name has at most 253 bytes.
const MOST_ADDRESS: usize = 300;
/// The longest path of a socket, with room for abstract names.
const MOST_PATH: usize = 4096;
/// The longest version of a node.
const MOST_VERSION: usize = 100;

fn invalid(message: impl Into<String>) -> RegisterError {
    refuse(Code::InvalidArgument, message)
}

impl Pool {
    /// The proof of this term, for the welcome to `node`. The node shows it to a master of an
    /// earlier term.
    pub fn prove_term(&self, node: &NodeName) -> Bytes {
        let prover = TermProver::new(self.cluster, self.seed);
        Bytes::copy_from_slice(&prover.prove(node, self.epoch))
    }

    /// Refuses a registration with impossible fields. It changes nothing, except that it records a
    /// node's proof of a later term.
    pub(super) fn check_registration(
        &self,
        registration: &Registration,
    ) -> Result<(), RegisterError> {
        check_words(registration)?;
        check_sizes(registration)?;
        check_secret(registration)?;
        self.check_epoch(registration)?;
        if !self.leads() {
            return Err(refuse(
                Code::NotLeader,
                format!("epoch {} is unconfirmed or over", self.epoch),
            ));
        }
        if self.members.is_dropped(registration.incarnation) {
            return Err(refuse(
                Code::IncarnationDropped,
                format!("incarnation {} was dropped", registration.incarnation),
            ));
        }
        let is_known = self.members.get(&registration.name).is_some();
        if !is_known && self.members.count() >= MOST_NODES {
            return Err(refuse(
                Code::TooManyHeld,
                format!("the pool has the maximum of {MOST_NODES} nodes"),
            ));
        }
        Ok(())
    }

    /// Only a proof ends a term: any peer can send a number.
    fn check_epoch(&self, registration: &Registration) -> Result<(), RegisterError> {
        let (name, seen) = (&registration.name, registration.epoch_seen);
        if seen <= self.epoch {
            return Ok(());
        }
        let prover = TermProver::new(self.cluster, self.seed);
        if prover.verify(name, seen, &registration.epoch_proof) {
            *self.superseded.lock() = Some(seen);
            self.superseded_told.notify_waiters();
            return Err(refuse(
                Code::NotLeader,
                format!(
                    "epoch {} is over: node {name} was welcomed to {seen}",
                    self.epoch
                ),
            ));
        }
        Err(refuse(
            Code::NotLeader,
            format!(
                "node {name} names epoch {seen} without proof, and this master leads in {}: if the \
                 master's data was put back to an older state, restart the node",
                self.epoch
            ),
        ))
    }

    /// Checks whether a session may continue a known incarnation.
    ///
    /// A network may cut a session silently, so a node may return while its old session still seems
    /// open. The node must then show the secret of its incarnation. A node without a secret waits
    /// until its incarnation is suspect.
    pub(super) fn check_life(
        &self,
        node: &StoreNode,
        registration: &Registration,
    ) -> Result<(), RegisterError> {
        let is_live = node.is_connected() && node.state() != NodeState::Suspect;
        if registration.secret.is_none() && is_live {
            return Err(refuse(
                Code::InProgress,
                format!(
                    "incarnation {} of node {} has a session, and the registration lacks its secret",
                    node.incarnation, node.name
                ),
            ));
        }
        Ok(())
    }
}

/// Checks names and addresses, since logs, tables, labels and every client get them.
fn check_words(registration: &Registration) -> Result<(), RegisterError> {
    let Registration {
        name,
        data_address,
        shm_path,
        version,
        ..
    } = registration;
    if !name.is_sound() {
        return Err(invalid(
            "a node name has 1 to 255 letters, digits, `-`, `_`, `.` or `:`",
        ));
    }
    let is_address =
        data_address.len() <= MOST_ADDRESS && data_address.chars().all(|c| c.is_ascii_graphic());
    if !is_address {
        return Err(invalid(format!(
            "the data address {data_address:.80?} is not host:port"
        )));
    }
    if shm_path.len() > MOST_PATH || shm_path.chars().any(char::is_control) {
        return Err(invalid(format!(
            "{shm_path:.80?} is not the path of a socket"
        )));
    }
    if version.len() > MOST_VERSION || !version.chars().all(|c| c.is_ascii_graphic()) {
        return Err(invalid(format!("{version:.80?} is not a version")));
    }
    Ok(())
}

fn check_sizes(registration: &Registration) -> Result<(), RegisterError> {
    let segments = &registration.segments;
    if segments.is_empty() || segments.iter().any(|(size, _)| size.0 == 0) {
        return Err(invalid("a node must offer at least one byte of memory"));
    }
    if segments.len() > MOST_SEGMENTS {
        return Err(invalid(format!(
            "{} segments exceed the limit of {MOST_SEGMENTS}",
            segments.len()
        )));
    }
    let total = segments
        .iter()
        .try_fold(0u64, |total, (size, _)| total.checked_add(size.0));
    if total.is_none_or(|total| total > MOST_BYTES) {
        return Err(invalid(format!(
            "the segments exceed {MOST_BYTES} bytes, the most that a process can map"
        )));
    }
    Ok(())
}

fn check_secret(registration: &Registration) -> Result<(), RegisterError> {
    let life = registration.incarnation;
    match &registration.secret {
        Some(secret) if secret.incarnation() == life => Ok(()),
        Some(_) => Err(refuse(
            Code::GrantRefused,
            format!("the secret does not belong to incarnation {life}"),
        )),
        None if life.has_secret() => Err(refuse(
            Code::GrantRefused,
            format!("the registration lacks the secret of incarnation {life}"),
        )),
        None => Ok(()),
    }
}
