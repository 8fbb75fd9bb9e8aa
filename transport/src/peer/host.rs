//! A process as its data port sees it: who may connect, and which memory a peer may touch.

use super::exposed::{ActiveReceives, ExposeError, Exposed, ReceiveGuard, StillTouched};
use super::mailbox::{MAX_MESSAGE, Mailbox};
use super::rooms::MemoryRooms;
use super::secret::Secret;
use crate::checksum::{checksum, sum_shared};
use crate::host::{Abort, Admission, Host, RdmaHost, Refused, WriteGuard};
use crate::memory::{Region, Slice};
use crate::rdma::Fabric;
use kvpool_types::wire::data::{Hello, HelloReply, ReadItem, WriteRequest, WrittenBlock};
use kvpool_types::wire::frame;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{
    CHUNK, Checksum, ChecksumAlgorithm, ClusterId, Code, Epoch, Extent, Grant, GrantSigner, HostId,
    Incarnation, Length, NodeName, Offset, SegmentId,
};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The cluster id of peer memory. A link meant for a store node is refused here, and a link meant
/// for a peer is refused by a store node.
pub const CLUSTER: ClusterId = ClusterId(u128::from_le_bytes(*b"kvpool peer mem1"));
/// The process's memory: an offset is an address.
pub const MEMORY: SegmentId = SegmentId(0);
/// A write to this segment is a message for the process.
pub(super) const MAILBOX: SegmentId = SegmentId(1);
/// Eight bytes: the address of the first exposed range, 0 when there is none.
pub(super) const INDEX: SegmentId = SegmentId(2);

const ALGORITHM: ChecksumAlgorithm = ChecksumAlgorithm::Crc64Nvme;

/// The requests that peers may make of this process.
pub(super) struct PeerHost {
    name: NodeName,
    session: Incarnation,
    secret: Secret,
    signer: GrantSigner,
    /// The ports that peers may use. Their protection domains hold no other registrations for
    /// peers, so no key opens any other memory of the process.
    rdma: Option<Arc<Fabric>>,
    pub(super) exposed: Exposed,
    pub(super) mailbox: Mailbox,
    pub(super) rooms: MemoryRooms,
}

impl PeerHost {
    /// A session with a new token. The session must own its fabric.
    pub(super) fn new(name: &str, secret: Secret, rdma: Option<Arc<Fabric>>) -> Self {
        let session = Incarnation(rand::random());
        Self {
            name: NodeName(name.to_owned()),
            session,
            signer: secret.grant_key(session).signer(),
            secret,
            rdma,
            exposed: Exposed::default(),
            mailbox: Mailbox::default(),
            rooms: MemoryRooms::default(),
        }
    }

    /// Exposes a range of this process's memory to peers.
    pub(super) fn expose(&self, memory: Slice) -> Result<(), ExposeError> {
        let exposure = self.rdma.as_ref().map(|fabric| fabric.expose(&memory));
        let exposure = exposure.transpose();
        let exposure = exposure.map_err(|error| ExposeError::NoPort(error.to_string()))?;
        self.exposed.insert(memory, exposure)
    }

    /// See [`Exposed::remove`].
    pub(super) fn withdraw(&self, address: u64, timeout: Duration) -> Result<bool, StillTouched> {
        self.exposed.remove(address, timeout)
    }

    /// The memory of an extent of [`MEMORY`], and the receives into its range.
    fn touch(&self, extent: &Extent) -> Result<(Slice, Arc<ActiveReceives>), Refused> {
        check_segment(extent)?;
        self.exposed
            .part(extent.offset.0, extent.length)
            .ok_or_else(|| not_registered(extent))
    }

    fn check_session(&self, session: Incarnation) -> Result<(), Refused> {
        if session == self.session {
            return Ok(());
        }
        refuse(
            Code::WrongIncarnation,
            "the request is for another session".to_owned(),
        )
    }

    fn check_grant(&self, session: Incarnation, grant: &Grant) -> Result<(), Refused> {
        self.check_session(session)?;
        // A mailbox belongs to the session, so that no room's key opens it.
        if grant.epoch == Epoch(0) && self.signer.verify(self.session, grant) {
            return Ok(());
        }
        refuse(
            Code::GrantRefused,
            "the write is not signed with the session's key".to_owned(),
        )
    }

    /// The memory that a write may touch, and the receives into its range or room.
    fn granted(
        &self,
        session: Incarnation,
        grant: &Grant,
    ) -> Result<(Slice, Arc<ActiveReceives>), Refused> {
        if grant.epoch == Epoch(0) {
            self.check_grant(session, grant)?;
            return self.touch(&grant.extent);
        }
        self.check_session(session)?;
        check_segment(&grant.extent)?;
        self.rooms.admit(session, grant).map_err(|code| Refused {
            code,
            message: format!("room {:x}: {}", grant.epoch.0, grant.extent),
        })
    }

    /// Performs one small write, entirely or not at all.
    fn place(&self, session: Incarnation, block: &WrittenBlock<'_>) -> Result<Code, Refused> {
        let is_message = block.grant.extent.segment == MAILBOX;
        let place = match is_message {
            true => {
                self.check_grant(session, block.grant)?;
                None
            }
            false => Some(self.granted(session, block.grant)?.0),
        };
        let came = block.bytes.chunks(Length(CHUNK).as_usize()).map(checksum);
        if !came.eq(block.sums()) {
            return Ok(Code::ChecksumMismatch);
        }
        let Some(place) = place else {
            return Ok(if block.bytes.len() as u64 > MAX_MESSAGE {
                Code::TooLarge
            } else {
                self.mailbox.leave(block.bytes)
            });
        };
        place.write_at(Offset(0), block.bytes);
        Ok(Code::Ok)
    }
}

fn refuse<T>(code: Code, message: String) -> Result<T, Refused> {
    Err(Refused { code, message })
}

fn check_segment(extent: &Extent) -> Result<(), Refused> {
    if extent.segment == MEMORY {
        return Ok(());
    }
    refuse(
        Code::OutOfRange,
        format!("segment {} does not exist", extent.segment),
    )
}

fn not_registered(extent: &Extent) -> Refused {
    Refused {
        code: Code::OutOfRange,
        message: format!(
            "{} bytes at {:#x} do not lie in registered memory",
            extent.length, extent.offset.0
        ),
    }
}

/// A receive into exposed memory.
struct Receiving {
    target: Slice,
    _listed: ReceiveGuard,
}

impl WriteGuard for Receiving {
    fn target(&self) -> &Slice {
        &self.target
    }

    fn finish(self: Box<Self>, sums: Vec<Checksum>) -> Code {
        if sum_shared(&self.target).chunks == sums {
            Code::Ok
        } else {
            Code::ChecksumMismatch
        }
    }
}

impl Host for PeerHost {
    fn hello(&self, hello: &Hello) -> Result<HelloReply, Refused> {
        if hello.min_version > frame::VERSION || hello.max_version < frame::MIN_VERSION {
            return refuse(
                Code::VersionMismatch,
                format!(
                    "the peer speaks versions {} to {}, this process {} to {}",
                    hello.min_version,
                    hello.max_version,
                    frame::MIN_VERSION,
                    frame::VERSION
                ),
            );
        }
        if hello.checksum_algorithm != ALGORITHM as u8 {
            return refuse(
                Code::VersionMismatch,
                format!(
                    "the peer uses checksum algorithm {}, this process {}",
                    hello.checksum_algorithm, ALGORITHM as u8
                ),
            );
        }
        if hello.cluster != CLUSTER {
            return refuse(
                Code::WrongCluster,
                "this port serves peer memory: it is no store node".to_owned(),
            );
        }
        // Checked before any error that depends on the session.
        if !self.secret.accepts(hello.client, hello.token.as_str()) {
            let message = if self.secret.is_none() {
                "the peer sent a secret, but this process has none"
            } else {
                "the peer's secret differs from this process's"
            };
            return refuse(Code::GrantRefused, message.to_owned());
        }
        if hello.incarnation != Incarnation(0) {
            self.check_session(hello.incarnation)?;
        }
        Ok(HelloReply {
            version: hello.max_version.min(frame::VERSION),
            cluster: CLUSTER,
            node: self.name.clone(),
            incarnation: self.session,
            host: HostId(0),
            checksum_algorithm: ALGORITHM as u8,
            features: kvpool_types::wire::features::Features::default(),
        })
    }

    fn epoch(&self) -> Epoch {
        Epoch(0)
    }

    /// Judges the whole extent even when a part of it is read, so that a transfer in pieces is
    /// refused as a whole.
    fn admit_read(
        &self,
        _epoch: Epoch,
        session: Incarnation,
        item: &ReadItem,
        _abort: &Arc<dyn Abort>,
    ) -> Result<Slice, Refused> {
        self.check_session(session)?;
        let whole = if item.extent.segment == INDEX {
            let first = self.exposed.first().unwrap_or(0);
            Region::from(first.to_le_bytes().to_vec()).whole()
        } else {
            self.touch(&item.extent)?.0
        };
        whole.slice(item.from, item.length).ok_or_else(|| Refused {
            code: Code::OutOfRange,
            message: format!("{} bytes from {} lie outside", item.length, item.from),
        })
    }

    fn admit_write(&self, session: Incarnation, grant: &Grant, abort: Arc<dyn Abort>) -> Admission {
        match self.granted(session, grant) {
            Ok((target, writers)) => Admission::Write(Box::new(Receiving {
                _listed: writers.enter(abort),
                target,
            })),
            Err(refused) => Admission::Refuse(refused),
        }
    }

    fn write_now(&self, request: &WriteRequest, payload: &[u8]) -> Vec<Code> {
        request
            .blocks(payload)
            .map(|block| {
                self.place(request.incarnation, &block)
                    .unwrap_or_else(|refused| {
                        tracing::debug!(%refused, extent = %block.grant.extent, "write refused");
                        refused.code
                    })
            })
            .collect()
    }

    /// The checksums of the memory's present content. A reader compares them with the checksums of
    /// the bytes it received.
    fn sums(
        &self,
        _epoch: Epoch,
        session: Incarnation,
        item: &ReadItem,
    ) -> Result<Vec<Checksum>, Refused> {
        self.check_session(session)?;
        let (memory, _) = self.touch(&item.extent)?;
        Ok(sum_shared(&memory).chunks)
    }

    fn count(&self, _read: Length, _written: Length) {}
}

impl RdmaHost for PeerHost {
    /// Names no memory, because registered ranges come and go. The session aborts the connection
    /// when it ends, and the queue pairs end with the connection.
    fn memory(
        &self,
        session: Incarnation,
        _abort: Weak<dyn Abort>,
    ) -> Result<Vec<(SegmentId, Slice)>, Refused> {
        self.check_session(session)?;
        Ok(Vec::new())
    }

    fn registrations(
        &self,
        session: Incarnation,
        extent: &Extent,
    ) -> Result<Vec<Registered>, Refused> {
        self.check_session(session)?;
        check_segment(extent)?;
        self.exposed
            .registrations(extent)
            .ok_or_else(|| not_registered(extent))
    }
}
