//! The host of a process's data port: which peers may connect, and which memory they may access.

use super::direct::Card;
use super::exposed::{ActiveReceives, ExposeError, Exposed, ReceiveGuard, StillTouched};
use super::letters::{LetterBox, LetterReader, MAX_LETTER};
use super::mailbox::{MAX_MESSAGE, Mailbox};
use super::room_writes::RoomWrite;
use super::rooms::{AdmittedWrite, MemoryRooms};
use super::secret::Secret;
use crate::checksum::{ChunkedSum, checksum, chunk_sums_shared, combine_chunks, sum_shared};
use crate::host::{Abort, Admission, Host, RdmaHost, Refused, WriteGuard};
use crate::memory::{Region, Slice, streaming, total_length};
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
/// The segment of the process's memory, in which an offset is an address.
pub const MEMORY: SegmentId = SegmentId(0);
/// A write to this segment is a message for the process.
pub(super) const MAILBOX: SegmentId = SegmentId(1);
/// A write to this segment is a letter: see `letters`.
pub(super) const LETTERS: SegmentId = SegmentId(3);
/// The card of this process: see `direct`.
pub(super) const CARD: SegmentId = SegmentId(4);
/// Eight bytes: the address of the first exposed range, 0 when there is none.
pub(super) const INDEX: SegmentId = SegmentId(2);
/// An extent of this segment names an address by its offset. Its bytes are the first address and the length of the
/// exposed range nearest to it, both 0 when there is none.
pub(super) const NEAREST: SegmentId = SegmentId(5);
/// The length of such an extent in bytes.
pub(super) const NEAREST_BYTES: u64 = 16;

/// The bytes that a receive sums and then copies.
const STEP: usize = 32 << 10;

const ALGORITHM: ChecksumAlgorithm = ChecksumAlgorithm::Crc64Nvme;

/// The requests that peers may make of this process.
pub(super) struct PeerHost {
    me: Weak<Self>,
    name: NodeName,
    session: Incarnation,
    secret: Secret,
    signer: GrantSigner,
    /// The ports that peers may use. Their protection domains hold no other registrations for
    /// peers, so no key opens any other memory of the process.
    rdma: Option<Arc<Fabric>>,
    /// Told to peers, where this process permits direct reads.
    pub(super) card: Option<Card>,
    pub(super) exposed: Exposed,
    pub(super) mailbox: Mailbox,
    pub(super) rooms: MemoryRooms,
    /// Takes letters, where the process exchanges some.
    letters: Option<LetterReader>,
}

/// The target of a write.
enum Place {
    /// An exposed range.
    Exposed(Slice, Arc<ActiveReceives>),
    /// A room.
    Room(AdmittedWrite),
    Message,
    Letter,
}

impl PeerHost {
    /// A session with a new token. The session must own its fabric.
    pub(super) fn new(
        name: &str,
        secret: Secret,
        rdma: Option<Arc<Fabric>>,
        card: Option<Card>,
        letter_box: Option<Arc<dyn LetterBox>>,
    ) -> Arc<Self> {
        let session = Incarnation(rand::random());
        let reader = |letter_box| LetterReader::new(secret.clone(), session, letter_box);
        let letters = letter_box.map(reader);
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            name: NodeName(name.to_owned()),
            session,
            signer: secret.grant_key(session).signer(),
            secret,
            rdma,
            card,
            exposed: Exposed::default(),
            mailbox: Mailbox::default(),
            rooms: MemoryRooms::default(),
            letters,
        })
    }

    /// The session.
    pub(super) const fn session(&self) -> Incarnation {
        self.session
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

    /// The memory that a write may fill.
    fn granted(&self, session: Incarnation, grant: &Grant) -> Result<Place, Refused> {
        if grant.epoch == Epoch(0) {
            self.check_grant(session, grant)?;
            return match grant.extent.segment {
                MAILBOX => Ok(Place::Message),
                LETTERS => Ok(Place::Letter),
                _ => {
                    let (memory, receives) = self.touch(&grant.extent)?;
                    Ok(Place::Exposed(memory, receives))
                }
            };
        }
        self.check_session(session)?;
        let admitted = self.rooms.admit(session, grant);
        admitted.map(Place::Room).map_err(|code| Refused {
            code,
            message: format!("room {:x}: {}", grant.epoch.0, grant.extent),
        })
    }

    /// Performs one small write, entirely or not at all.
    fn place(&self, session: Incarnation, block: &WrittenBlock<'_>) -> Result<Code, Refused> {
        let place = self.granted(session, block.grant)?;
        let sums = block.bytes.chunks(Length(CHUNK).as_usize()).map(checksum);
        let sums: Vec<Checksum> = sums.collect();
        if !sums.iter().copied().eq(block.sums()) {
            return Ok(Code::ChecksumMismatch);
        }
        Ok(match place {
            Place::Exposed(memory, _) => {
                memory.write_at(Offset(0), block.bytes);
                Code::Ok
            }
            Place::Room(AdmittedWrite { parts, noted, .. }) => {
                let mut rest = block.bytes;
                for part in &parts {
                    let (bytes, after) = rest.split_at(part.length().as_usize());
                    part.write_at(Offset(0), bytes);
                    rest = after;
                }
                noted.done(combine_chunks(Length(block.bytes.len() as u64), &sums));
                Code::Ok
            }
            Place::Message if block.bytes.len() as u64 > MAX_MESSAGE => Code::TooLarge,
            Place::Message => self.mailbox.leave(block.bytes),
            Place::Letter => self.letter(block.bytes),
        })
    }

    fn letter(&self, bytes: &[u8]) -> Code {
        match &self.letters {
            Some(letters) => letters.take(bytes),
            None => Code::Unimplemented,
        }
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

/// A receive into exposed memory, or into a room.
struct Receiving {
    /// The record of a room's writes. It is dropped before the memory, because the fence waits for the
    /// memory's drop.
    noted: Option<RoomWrite>,
    parts: Vec<Slice>,
    /// The bytes of all parts together. There may be many thousand parts, and a piece must not add them up.
    length: Length,
    /// What [`WriteGuard::take`] has placed.
    taken: Taken,
    _listed: ReceiveGuard,
}

/// The bytes that a receive has placed.
#[derive(Default)]
struct Taken {
    sum: ChunkedSum,
    /// The number of bytes so far, over all parts.
    bytes: u64,
    /// The index of the part for the next byte.
    part: usize,
    /// The place of the next byte in that part.
    at: u64,
}

impl Receiving {
    fn new(noted: Option<RoomWrite>, parts: Vec<Slice>, listed: ReceiveGuard) -> Box<Self> {
        Box::new(Self {
            noted,
            length: total_length(&parts),
            parts,
            taken: Taken::default(),
            _listed: listed,
        })
    }

    /// Copies the next bytes to the parts.
    fn place(&mut self, mut bytes: &[u8], streams: bool) {
        let taken = &mut self.taken;
        while let Some(part) = self.parts.get(taken.part)
            && !bytes.is_empty()
        {
            let room = part.length().0 - taken.at;
            let (now, rest) = bytes.split_at(Length(room).as_usize().min(bytes.len()));
            match streams {
                true => part.stream_at(Offset(taken.at), now),
                false => part.write_at(Offset(taken.at), now),
            }
            taken.at += now.len() as u64;
            if taken.at == part.length().0 {
                (taken.part, taken.at) = (taken.part + 1, 0);
            }
            bytes = rest;
        }
    }
}

impl WriteGuard for Receiving {
    fn parts(&self) -> &[Slice] {
        &self.parts
    }

    fn takes_bytes(&self) -> bool {
        true
    }

    /// Sums the bytes before it places them, while they are in the nearest cache. Large pages bypass the caches.
    fn take(&mut self, bytes: &[u8]) {
        let streams = self.length.0 >= streaming::STREAMED;
        self.taken.bytes += bytes.len() as u64;
        for step in bytes.chunks(STEP) {
            self.taken.sum.update(step);
            self.place(step, streams);
        }
        if streams {
            // No byte is placed after the drop of this guard.
            streaming::fence();
        }
    }

    fn finish(mut self: Box<Self>, sums: Vec<Checksum>) -> Code {
        let length = self.length;
        let found = match self.taken.bytes == length.0 {
            true => std::mem::take(&mut self.taken.sum).finish_chunks(),
            // The bytes came into the parts by another way, as over RDMA.
            false => chunk_sums_shared(&self.parts),
        };
        if found != sums {
            return Code::ChecksumMismatch;
        }
        if let Some(noted) = self.noted.take() {
            noted.done(combine_chunks(length, &sums));
        }
        Code::Ok
    }
}

/// A receive of a letter that is too long for one frame's small writes.
struct ReceivingLetter {
    host: Arc<PeerHost>,
    bytes: [Slice; 1],
}

impl WriteGuard for ReceivingLetter {
    fn parts(&self) -> &[Slice] {
        &self.bytes
    }

    fn finish(self: Box<Self>, sums: Vec<Checksum>) -> Code {
        let [bytes] = &self.bytes;
        if sum_shared(bytes).chunks != sums {
            return Code::ChecksumMismatch;
        }
        self.host.letter(&bytes.to_vec())
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
        } else if item.extent.segment == NEAREST {
            let nearest = self.exposed.nearest(item.extent.offset.0);
            let (start, length) = nearest.unwrap_or_default();
            let bytes = [start.to_le_bytes(), length.to_le_bytes()].concat();
            Region::from(bytes).whole()
        } else if let (CARD, Some(card)) = (item.extent.segment, &self.card) {
            Region::from(card.bytes()).whole()
        } else {
            self.touch(&item.extent)?.0
        };
        whole.slice(item.from, item.length).ok_or_else(|| Refused {
            code: Code::OutOfRange,
            message: format!("{} bytes from {} lie outside", item.length, item.from),
        })
    }

    fn admit_write(&self, session: Incarnation, grant: &Grant, abort: Arc<dyn Abort>) -> Admission {
        let guard: Box<dyn WriteGuard> = match self.granted(session, grant) {
            Ok(Place::Exposed(memory, receives)) => {
                Receiving::new(None, vec![memory], receives.enter(abort))
            }
            Ok(Place::Room(admitted)) => Receiving::new(
                Some(admitted.noted),
                admitted.parts,
                admitted.receives.enter(abort),
            ),
            Ok(Place::Letter) if grant.extent.length.0 <= MAX_LETTER => Box::new(ReceivingLetter {
                host: self
                    .me
                    .upgrade()
                    .expect("invariant: the server holds its host"),
                bytes: [Region::allocate(grant.extent.length).whole()],
            }),
            Ok(Place::Letter | Place::Message) => {
                return Admission::Refuse(Refused {
                    code: Code::TooLarge,
                    message: format!("a message of {} bytes", grant.extent.length),
                });
            }
            Err(refused) => return Admission::Refuse(refused),
        };
        Admission::Write(guard)
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
