//! The links to one session of a peer: letters, and writes into its rooms. No call blocks.

use super::host::LETTERS;
use super::letters::{LetterWriter, MAX_LETTER};
use super::rooms::{RoomPass, view_extent};
use super::targets::Connected;
use crate::link::{TransferError, TransferResult, WriteOp};
use crate::memory::{Region, Slice, total_length};
use crate::outcomes::{deadline_exceeded, invalid};
use futures::FutureExt;
use futures::future::BoxFuture;
use kvpool_types::checksum::combine;
use kvpool_types::{Checksum, Epoch, Extent, GrantId, Incarnation, Length, Offset};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The most bytes of one write into a room. The checksum of a write is computed at its end, while its last
/// part is in the cache.
const PIECE_BYTES: u64 = 1 << 20;

/// Bytes for one range of a room's view.
#[derive(Clone, Debug)]
pub struct RoomPart {
    /// The number of the view, from 0.
    pub view: u32,
    /// The first byte within the view.
    pub offset: u64,
    /// The bytes, in order.
    pub from: Vec<Slice>,
}

/// The links to one session of a peer.
#[derive(Clone)]
pub struct PeerLink {
    pub(super) connected: Connected,
    pub(super) grants: Arc<AtomicU64>,
    pub(super) letters: Option<Arc<LetterWriter>>,
}

impl std::fmt::Debug for PeerLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PeerLink({})", self.connected.session)
    }
}

impl PeerLink {
    /// The session at the other end.
    pub const fn session(&self) -> Incarnation {
        self.connected.session
    }

    /// Whether the links still work. Links that failed stay failed.
    pub fn is_open(&self) -> bool {
        self.connected.is_open()
    }

    /// Writes into a room of the peer, over TCP. The result is the checksum of all bytes, in the order of the
    /// parts. The future ends when no thread touches the memory any more. The write continues if the future
    /// is dropped.
    ///
    /// # Errors
    ///
    /// [`kvpool_types::Code::GrantEnded`] when the room is closed,
    /// [`kvpool_types::Code::GrantRefused`] when its key differs,
    /// [`kvpool_types::Code::OutOfRange`] when a part leaves its view. Otherwise as
    /// [`super::Endpoint::route`].
    pub fn write_room(
        &self,
        pass: &RoomPass,
        parts: &[RoomPart],
        deadline: Instant,
    ) -> BoxFuture<'static, TransferResult> {
        let signer = pass.key.signer();
        let (mut ops, mut lengths) = (Vec::new(), Vec::new());
        for part in parts {
            for (extent, from) in pieces(part) {
                let Some(extent) = extent else {
                    let error = invalid("a part of a room exceeds the address space".to_owned());
                    return std::future::ready(Err(error)).boxed();
                };
                lengths.push(extent.length);
                let id = GrantId(self.grants.fetch_add(1, Ordering::Relaxed));
                let grant = signer.sign(self.connected.session, pass.epoch, id, extent);
                ops.push(WriteOp { grant, from });
            }
        }
        if ops.is_empty() {
            return std::future::ready(Ok(Checksum(0))).boxed();
        }
        let writing = self.connected.tcp.write(ops, deadline);
        async move {
            let written = writing.await;
            if written.len() != lengths.len() {
                return Err(deadline_exceeded());
            }
            let mut whole = Checksum(0);
            for (length, outcome) in lengths.into_iter().zip(written) {
                whole = combine(whole, outcome?, length);
            }
            Ok(whole)
        }
        .boxed()
    }

    /// Sends a letter of at most 8 MiB. Letters to one peer must be sent one after the other.
    ///
    /// # Errors
    ///
    /// [`kvpool_types::Code::InvalidArgument`] when this endpoint exchanges no letters, or for a
    /// letter that is too long. [`kvpool_types::Code::StaleEpoch`] when a later letter overtook it.
    /// Otherwise the peer's code, or as [`super::Endpoint::route`].
    pub fn post(
        &self,
        body: &[u8],
        deadline: Instant,
    ) -> BoxFuture<'static, Result<(), TransferError>> {
        let sealed = match &self.letters {
            Some(letters) => letters.seal(self.connected.session, body),
            None => {
                let error = invalid("this endpoint exchanges no letters".to_owned());
                return std::future::ready(Err(error)).boxed();
            }
        };
        let length = Length(sealed.len() as u64);
        if length.0 > MAX_LETTER {
            let error = invalid(format!(
                "a letter has at most {MAX_LETTER} bytes, not {length}"
            ));
            return std::future::ready(Err(error)).boxed();
        }
        let Connected {
            signer, session, ..
        } = &self.connected;
        let extent = Extent {
            segment: LETTERS,
            offset: Offset(0),
            length,
        };
        let id = GrantId(self.grants.fetch_add(1, Ordering::Relaxed));
        let write = WriteOp {
            grant: signer.sign(*session, Epoch(0), id, extent),
            from: vec![Region::from(sealed).whole()],
        };
        let writing = self.connected.tcp.write(vec![write], deadline);
        async move {
            let outcome = writing
                .await
                .pop()
                .unwrap_or_else(|| Err(deadline_exceeded()));
            outcome.map(drop)
        }
        .boxed()
    }
}

/// The pieces of a part, at most [`PIECE_BYTES`] each: the target extent and the bytes of each.
fn pieces(part: &RoomPart) -> Vec<(Option<Extent>, Vec<Slice>)> {
    let mut pieces = Vec::new();
    let mut offset = part.offset;
    let mut open: Vec<Slice> = Vec::new();
    let mut filled = 0;
    let mut close = |open: &mut Vec<Slice>, offset: &mut u64| {
        let from = std::mem::take(open);
        let length = total_length(&from);
        let end = offset.checked_add(length.0);
        let extent = view_extent(part.view, Offset(*offset), length).filter(|_| end.is_some());
        *offset = end.unwrap_or(u64::MAX);
        pieces.push((extent, from));
    };
    for slice in &part.from {
        let mut at = 0;
        while at < slice.length().0 {
            let taken = (PIECE_BYTES - filled).min(slice.length().0 - at);
            open.extend(slice.slice(Offset(at), Length(taken)));
            at += taken;
            filled += taken;
            if filled == PIECE_BYTES {
                close(&mut open, &mut offset);
                filled = 0;
            }
        }
    }
    if filled > 0 {
        close(&mut open, &mut offset);
    }
    pieces
}
