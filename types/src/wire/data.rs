//! The meta parts of data-port frames.

mod read;

pub use read::{ReadItem, ReadRequest};

use super::features::Features;
use super::{DecodeError, Reader, reader::put_str16};
use crate::grant::MAC_BYTES;
use crate::token::Token;
use crate::{
    Checksum, ClientId, ClusterId, Code, Epoch, Extent, Grant, GrantId, HostId, Incarnation,
    Length, NodeName, Offset, SegmentId,
};

/// The most extents in one frame.
pub const MAX_ITEMS: u32 = 4096;

/// A type that a frame's meta part can hold.
pub trait Meta: Sized {
    /// Appends the encoded bytes.
    fn encode(&self, out: &mut Vec<u8>);
    /// Decodes all of `bytes`.
    ///
    /// # Errors
    ///
    /// See [`DecodeError`].
    fn decode(bytes: &[u8]) -> Result<Self, DecodeError>;

    /// The encoded bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode(&mut out);
        out
    }
}

/// Opens a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version that the client supports.
    pub min_version: u16,
    /// The newest version that the client supports.
    pub max_version: u16,
    /// The pool that the client expects.
    pub cluster: ClusterId,
    /// The client's id.
    pub client: ClientId,
    /// The incarnation that the client expects; zero accepts any.
    pub incarnation: Incarnation,
    /// The wire number of its checksum algorithm.
    pub checksum_algorithm: u8,
    /// The credential; empty while authentication is off.
    pub token: Token,
}

impl Meta for Hello {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.min_version.to_le_bytes());
        out.extend_from_slice(&self.max_version.to_le_bytes());
        out.extend_from_slice(&self.cluster.to_bytes());
        out.extend_from_slice(&self.client.to_bytes());
        out.extend_from_slice(&self.incarnation.to_bytes());
        out.push(self.checksum_algorithm);
        put_str16(out, self.token.as_str());
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "hello");
        let hello = Self {
            min_version: r.u16()?,
            max_version: r.u16()?,
            cluster: ClusterId(r.u128()?),
            client: ClientId(r.u128()?),
            incarnation: Incarnation(r.u128()?),
            checksum_algorithm: r.u8()?,
            token: r.str16()?.to_owned().into(),
        };
        // Later versions may append fields.
        Ok(hello)
    }
}

/// Answers a hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// The version that both sides will use.
    pub version: u16,
    /// The pool that the node belongs to.
    pub cluster: ClusterId,
    /// The node's name.
    pub node: NodeName,
    /// The node's current incarnation.
    pub incarnation: Incarnation,
    /// The machine that the node runs on.
    pub host: HostId,
    /// The wire number of its checksum algorithm.
    pub checksum_algorithm: u8,
    /// The features that the node shares, from the header of the answer: not in the meta.
    pub features: Features,
}

impl Meta for HelloReply {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&self.cluster.to_bytes());
        put_str16(out, &self.node.0);
        out.extend_from_slice(&self.incarnation.to_bytes());
        out.extend_from_slice(&self.host.to_bytes());
        out.push(self.checksum_algorithm);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "hello reply");
        let reply = Self {
            version: r.u16()?,
            cluster: ClusterId(r.u128()?),
            node: NodeName(r.str16()?.to_owned()),
            incarnation: Incarnation(r.u128()?),
            host: HostId(r.u128()?),
            checksum_algorithm: r.u8()?,
            features: Features::default(),
        };
        // Later versions may append fields.
        Ok(reply)
    }
}

/// Writes whole extents, or announces that they will be written. The payload of a write has a part for each
/// grant, in order. A part holds the block's bytes, then the checksums of its 64 KiB chunks, 8 bytes each.
/// The sender computes the checksums while it sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteRequest {
    /// The incarnation that holds the extents.
    pub incarnation: Incarnation,
    /// The grants, one per extent.
    pub grants: Vec<Grant>,
}

/// The encoded length of one grant.
const GRANT_BYTES: usize = 20 + 8 + 8 + MAC_BYTES;

impl WriteRequest {
    /// The length of a write's payload in bytes; `None` on overflow.
    pub fn payload_bytes(&self) -> Option<u64> {
        self.grants.iter().try_fold(0u64, |sum, grant| {
            let length = grant.extent.length;
            sum.checked_add(length.0)?.checked_add(length.chunks() * 8)
        })
    }

    /// The blocks in a payload of [`WriteRequest::payload_bytes`], each with its grant. Stops early
    /// when the payload is too short.
    pub fn blocks<'a>(&'a self, mut payload: &'a [u8]) -> impl Iterator<Item = WrittenBlock<'a>> {
        self.grants.iter().map_while(move |grant| {
            let length = grant.extent.length;
            let (bytes, rest) = payload.split_at_checked(length.as_usize())?;
            let sums_bytes = Length(length.chunks() * 8).as_usize();
            let (sums, rest) = rest.split_at_checked(sums_bytes)?;
            payload = rest;
            Some(WrittenBlock { grant, bytes, sums })
        })
    }
}

/// One block of a write's payload.
#[derive(Clone, Copy, Debug)]
pub struct WrittenBlock<'a> {
    /// The grant of the block.
    pub grant: &'a Grant,
    /// The block's bytes, as long as the extent.
    pub bytes: &'a [u8],
    /// The encoded checksums of its chunks, 8 bytes each.
    sums: &'a [u8],
}

impl WrittenBlock<'_> {
    /// The checksums of the 64 KiB chunks.
    pub fn sums(&self) -> impl ExactSizeIterator<Item = Checksum> {
        let (sums, _) = self.sums.as_chunks();
        sums.iter().map(|sum| Checksum(u64::from_le_bytes(*sum)))
    }
}

impl Meta for WriteRequest {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.incarnation.to_bytes());
        out.reserve(self.grants.len() * GRANT_BYTES);
        put_count(out, self.grants.len());
        for grant in &self.grants {
            put_extent(out, &grant.extent);
            out.extend_from_slice(&grant.epoch.0.to_le_bytes());
            out.extend_from_slice(&grant.id.0.to_le_bytes());
            out.extend_from_slice(&grant.mac);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "write request");
        let incarnation = Incarnation(r.u128()?);
        let grants = list(&mut r, |r| {
            Ok(Grant {
                extent: extent(r)?,
                epoch: Epoch(r.u64()?),
                id: GrantId(r.u64()?),
                mac: *r.array::<MAC_BYTES>()?,
            })
        })?;
        r.finish()?;
        Ok(Self {
            incarnation,
            grants,
        })
    }
}

/// Ends announced writes, over shared memory or RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteEnd {
    /// Each ended grant with the checksums of its chunks; no checksums when the write was aborted.
    pub items: Vec<(GrantId, Vec<Checksum>)>,
}

impl Meta for WriteEnd {
    fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.items.len());
        for (grant, sums) in &self.items {
            out.extend_from_slice(&grant.0.to_le_bytes());
            put_sums(out, sums);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "write end");
        let items = list(&mut r, |r| Ok((GrantId(r.u64()?), sums(r)?)))?;
        r.finish()?;
        Ok(Self { items })
    }
}

/// Pins or unpins extents of one incarnation for views. The client of the connection holds a pin until it
/// removes the pin or its process exits. The node counts the pins of each extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinRequest {
    /// The incarnation that holds the extents.
    pub incarnation: Incarnation,
    /// The extents.
    pub extents: Vec<Extent>,
}

impl Meta for PinRequest {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.incarnation.to_bytes());
        put_count(out, self.extents.len());
        for extent in &self.extents {
            put_extent(out, extent);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "pin request");
        let incarnation = Incarnation(r.u128()?);
        let extents = list(&mut r, extent)?;
        r.finish()?;
        Ok(Self {
            incarnation,
            extents,
        })
    }
}

/// Asks for the memory of one segment, or for the connection's pin board.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRequest {
    /// The incarnation that holds the segment.
    pub incarnation: Incarnation,
    /// The segment.
    pub segment: SegmentId,
    /// Whether to map for writing; otherwise the descriptor is read-only.
    pub writable: bool,
}

impl MapRequest {
    /// The segment number that stands for the connection's pin board, which is mapped writable. No master
    /// assigns this number. So a node without boards answers that the segment does not exist, and the
    /// connection continues. An unknown operation would end the connection.
    pub const BOARD: SegmentId = SegmentId(u32::MAX);
}

impl Meta for MapRequest {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.incarnation.to_bytes());
        out.extend_from_slice(&self.segment.0.to_le_bytes());
        out.push(self.writable.into());
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "map request");
        let request = Self {
            incarnation: Incarnation(r.u128()?),
            segment: SegmentId(r.u32()?),
            writable: match r.u8()? {
                0 => false,
                1 => true,
                other => {
                    return Err(DecodeError::BadValue {
                        what: "writable",
                        value: other.into(),
                    });
                }
            },
        };
        r.finish()?;
        Ok(request)
    }
}

/// Answers a map request. The file descriptor is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapReply {
    /// The size of the segment, in bytes.
    pub size: Length,
}

impl Meta for MapReply {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.size.0.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "map reply");
        let size = Length(r.u64()?);
        r.finish()?;
        Ok(Self { size })
    }
}

/// One code for each item of a request, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statuses(pub Vec<Code>);

impl Meta for Statuses {
    fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.0.len());
        for code in &self.0 {
            out.extend_from_slice(&code.to_wire().to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "statuses");
        let codes = list(&mut r, code)?;
        r.finish()?;
        Ok(Self(codes))
    }
}

/// The chunk checksums of each extent of the request, as its writer gave them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumsReply(pub Vec<Result<Vec<Checksum>, Code>>);

impl Meta for SumsReply {
    fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.0.len());
        for item in &self.0 {
            let code = item.as_ref().err().copied().unwrap_or(Code::Ok);
            out.extend_from_slice(&code.to_wire().to_le_bytes());
            put_sums(out, item.as_deref().unwrap_or_default());
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "sums reply");
        let items = list(&mut r, |r| {
            let code = code(r)?;
            let sums = sums(r)?;
            Ok(if code == Code::Ok {
                Ok(sums)
            } else {
                Err(code)
            })
        })?;
        r.finish()?;
        Ok(Self(items))
    }
}

/// Answers a request that failed as a whole. If the code says that the frame could not be read, the
/// connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The stable code.
    pub code: Code,
    /// A message for people, with the values that matter.
    pub message: String,
}

impl Meta for Failure {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.code.to_wire().to_le_bytes());
        put_str16(out, &self.message);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "failure");
        let failure = Self {
            code: code(&mut r)?,
            message: r.str16()?.to_owned(),
        };
        r.finish()?;
        Ok(failure)
    }
}

pub(super) fn put_count(out: &mut Vec<u8>, count: usize) {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    out.extend_from_slice(&count.to_le_bytes());
}

fn put_extent(out: &mut Vec<u8>, extent: &Extent) {
    out.extend_from_slice(&extent.segment.0.to_le_bytes());
    out.extend_from_slice(&extent.offset.0.to_le_bytes());
    out.extend_from_slice(&extent.length.0.to_le_bytes());
}

fn put_sums(out: &mut Vec<u8>, sums: &[Checksum]) {
    put_count(out, sums.len());
    for sum in sums {
        out.extend_from_slice(&sum.0.to_le_bytes());
    }
}

pub(super) fn list<'a, T>(
    r: &mut Reader<'a>,
    item: impl FnMut(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    let count = r.u32()?;
    list_of(r, count, item)
}

fn list_of<'a, T>(
    r: &mut Reader<'a>,
    count: u32,
    mut item: impl FnMut(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    if count > MAX_ITEMS {
        return Err(DecodeError::Oversized {
            what: "item count",
            size: count.into(),
            limit: MAX_ITEMS.into(),
        });
    }
    (0..count).map(|_| item(r)).collect()
}

fn extent(r: &mut Reader<'_>) -> Result<Extent, DecodeError> {
    let extent = Extent {
        segment: SegmentId(r.u32()?),
        offset: Offset(r.u64()?),
        length: Length(r.u64()?),
    };
    match extent.end() {
        Some(_) => Ok(extent),
        None => Err(DecodeError::BadValue {
            what: "extent end",
            value: extent.length.0,
        }),
    }
}

fn sums(r: &mut Reader<'_>) -> Result<Vec<Checksum>, DecodeError> {
    // Bounded by the meta limit, not by `MAX_ITEMS`, because a large block has many chunks.
    let count = r.u32()?;
    if u64::from(count) * 8 > r.remaining() as u64 {
        return Err(DecodeError::Truncated { what: "checksums" });
    }
    (0..count).map(|_| r.u64().map(Checksum)).collect()
}

pub(super) fn code(r: &mut Reader<'_>) -> Result<Code, DecodeError> {
    Ok(Code::from_peer(r.u16()?.into()))
}

#[cfg(test)]
pub(super) use tests::check;

#[cfg(test)]
mod tests;
