//! Decoding of records. Every count and length is compared with the bytes present.

use super::{
    AFFIXED_DIGEST, COMMIT, CRC_BYTES, Commit, EVERYWHERE, EXTENDED, FORMAT, HARD_PIN,
    HAS_LATER_FIELDS, HAS_PARENT, HAS_PLACES, INCARNATION_DROPPED, IncarnationDropped, NAMESPACE,
    Namespace, PARENT_IS_PREVIOUS, PLAIN_DIGEST, Places, REMOVE, REPLICA_GONE, REQUIRED, Record,
    Remove, ReplicaGone, SEED, SEGMENT, SEGMENT_GONE, Seed, Segment, SegmentGone, TAG_MASK, TEXT,
    UNLEASED, VERSIONS_GRANTED, VersionsGranted, crc, extended,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::key::MAX_KEY_BYTES;
use kvpool_types::wire::{DecodeError, Reader};
use kvpool_types::{
    Checksum, ChecksumAlgorithm, Incarnation, Key, KeyRef, Length, NodeName, Offset, SegmentId,
    Version, namespace,
};

/// The fewest bytes of a record. A count is compared with it before memory is allocated.
const LEAST_RECORD_BYTES: usize = 2;
/// The fewest bytes of a replica.
const LEAST_REPLICA_BYTES: usize = 2;

/// Why stored records are unreadable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The bytes differ from the written ones.
    #[error("the CRC-64 does not match")]
    Crc,
    /// Another version of kvmaster wrote the records.
    #[error(
        "records have format {0}; this kvmaster, {this}, reads format {FORMAT}: run the version that wrote them",
        this = env!("CARGO_PKG_VERSION")
    )]
    Format(u8),
    /// A record must not be skipped, and this version does not know its kind.
    #[error(
        "a record of kind {kind} was written by kvmaster {version} and must not be skipped; this is kvmaster \
         {this}: run {version} or later here",
        this = env!("CARGO_PKG_VERSION")
    )]
    Unknown {
        /// The kind.
        kind: u64,
        /// The version that wrote the record.
        version: String,
    },
    /// The block checksums are of an algorithm that this version does not know.
    #[error("block checksums have the unknown algorithm {0}")]
    Algorithm(u8),
    /// The CRC is right, but the bytes are not records.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
}

/// The content of a group or chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// The number of shards when the snapshot was made; 0 in the log.
    pub shards: u32,
    /// The records in order.
    pub records: Vec<Record>,
}

/// Decodes a group or a chunk.
///
/// # Errors
///
/// [`RecordError`] when the bytes were changed, or when a later version wrote a record that must
/// not be skipped.
pub fn decode(bytes: &[u8]) -> Result<Decoded, RecordError> {
    let (body, tail) = bytes
        .split_last_chunk::<CRC_BYTES>()
        .ok_or(RecordError::Crc)?;
    if crc(body) != u64::from_le_bytes(*tail) {
        return Err(RecordError::Crc);
    }
    let mut decoder = Decoder {
        reader: Reader::new(body, "records"),
        entries: Vec::new(),
        version: Version(0),
        previous: None,
    };
    let format = decoder.reader.u8()?;
    if format != FORMAT {
        return Err(RecordError::Format(format));
    }
    let algorithm = decoder.reader.u8()?;
    ChecksumAlgorithm::from_wire(algorithm).ok_or(RecordError::Algorithm(algorithm))?;
    let shards = decoder.varint32("shards")?;
    let count = decoder.count("record count", LEAST_RECORD_BYTES)?;
    let mut records = Vec::with_capacity(count);
    for _ in 0..count {
        records.extend(decoder.record()?);
    }
    decoder.reader.finish()?;
    Ok(Decoded { shards, records })
}

struct Decoder<'a> {
    reader: Reader<'a>,
    entries: Vec<Entry<'a>>,
    version: Version,
    previous: Option<(NamespaceId, Key)>,
}

#[derive(Clone, Copy)]
struct Entry<'a> {
    namespace: NamespaceId,
    affixes: Option<(&'a str, &'a str)>,
}

impl<'a> Decoder<'a> {
    /// The next record; `None` for a skipped record.
    fn record(&mut self) -> Result<Option<Record>, RecordError> {
        let tag = self.reader.u8()?;
        let kind = tag & TAG_MASK;
        if kind == EXTENDED {
            return self.extended(tag);
        }
        let flags = tag & !TAG_MASK & !HAS_LATER_FIELDS;
        if kind != COMMIT && flags != 0 {
            return Err(bad("record tag", tag.into()).into());
        }
        let mut record = self.of_format_1(kind, flags)?;
        if tag & HAS_LATER_FIELDS != 0 {
            let length = self.count("length of later fields", 1)?;
            let fields = Reader::new(self.reader.take(length)?, "later fields");
            let behind = std::mem::replace(&mut self.reader, fields);
            let read = self.later_fields(&mut record);
            self.reader = behind;
            read?;
        }
        Ok(Some(record))
    }

    /// Decodes the later fields that this version knows. Others may follow.
    fn later_fields(&mut self, record: &mut Record) -> Result<(), DecodeError> {
        if self.reader.remaining() == 0 {
            return Ok(());
        }
        match record {
            Record::Remove(remove) => {
                let flags = self.reader.u8()?;
                remove.unleased = flags & UNLEASED != 0;
                remove.everywhere = flags & EVERYWHERE != 0;
                if flags & HAS_PLACES != 0 {
                    remove.places = self.places()?;
                }
            }
            Record::ReplicaGone(gone) => gone.offset = Some(Offset(self.varint()?)),
            _ => {}
        }
        Ok(())
    }

    fn extended(&mut self, tag: u8) -> Result<Option<Record>, RecordError> {
        if tag & !TAG_MASK & !REQUIRED != 0 {
            return Err(bad("record tag", tag.into()).into());
        }
        let kind = self.varint()?;
        let version = self.text()?;
        let length = self.count("length of a record", 1)?;
        let fields = self.reader.take(length)?;
        match extended::decode(kind, fields) {
            Some(record) => Ok(Some(record?)),
            None if tag & REQUIRED == 0 => Ok(None),
            None => Err(RecordError::Unknown {
                kind,
                version: version.escape_default().to_string(),
            }),
        }
    }

    fn of_format_1(&mut self, kind: u8, flags: u8) -> Result<Record, DecodeError> {
        Ok(match kind {
            COMMIT => Record::Commit(self.commit(flags)?),
            REMOVE => {
                let (namespace, key) = self.key()?;
                Record::Remove(Remove {
                    namespace,
                    key,
                    version: self.version()?,
                    unleased: false,
                    everywhere: false,
                    places: Places::new(),
                })
            }
            REPLICA_GONE => {
                let (namespace, key) = self.key()?;
                Record::ReplicaGone(ReplicaGone {
                    namespace,
                    key,
                    version: self.version()?,
                    segment: SegmentId(self.varint32("segment")?),
                    offset: None,
                })
            }
            NAMESPACE => Record::Namespace(Namespace {
                id: NamespaceId(self.varint32("namespace")?),
                namespace: namespace::Namespace {
                    name: self.text()?.to_owned(),
                    model: self.text()?.to_owned(),
                    dtype: self.text()?.to_owned(),
                    parallel_rank: self.text()?.to_owned(),
                    salt: self.text()?.to_owned(),
                },
            }),
            SEGMENT => Record::Segment(Segment {
                id: SegmentId(self.varint32("segment")?),
                node: self.node()?,
                incarnation: self.incarnation()?,
                index: self.varint32("segment index")?,
                size: Length(self.varint()?),
            }),
            SEGMENT_GONE => Record::SegmentGone(SegmentGone {
                id: SegmentId(self.varint32("segment")?),
            }),
            INCARNATION_DROPPED => Record::IncarnationDropped(IncarnationDropped {
                node: self.node()?,
                incarnation: self.incarnation()?,
            }),
            SEED => Record::Seed(Seed {
                seed: self.reader.u64()?,
            }),
            VERSIONS_GRANTED => Record::VersionsGranted(VersionsGranted {
                until: Version(self.varint()?),
            }),
            _ => return Err(bad("record tag", kind.into())),
        })
    }

    fn commit(&mut self, flags: u8) -> Result<Commit, DecodeError> {
        if flags & !(HARD_PIN | HAS_PARENT | PARENT_IS_PREVIOUS) != 0 {
            return Err(bad("commit flags", flags.into()));
        }
        let (namespace, key) = self.key()?;
        let version = self.version()?;
        let length = Length(self.varint()?);
        let checksum = Checksum(self.reader.u64()?);
        let replicas = self.places()?;
        let parent = match (flags & PARENT_IS_PREVIOUS != 0, flags & HAS_PARENT != 0) {
            (true, true) => return Err(bad("commit flags", flags.into())),
            (true, false) => match &self.previous {
                Some((of, previous)) if *of == namespace => Some(previous.clone()),
                _ => return Err(bad("commit flags", flags.into())),
            },
            (false, true) => match self.key()? {
                (of, parent) if of == namespace => Some(parent),
                (of, _) => return Err(bad("namespace of a parent", of.0.into())),
            },
            (false, false) => None,
        };
        self.previous = Some((namespace, key.clone()));
        Ok(Commit {
            namespace,
            key,
            version,
            length,
            checksum,
            replicas,
            parent,
            hard_pin: flags & HARD_PIN != 0,
        })
    }

    fn places(&mut self) -> Result<Places, DecodeError> {
        let count = self.count("replica count", LEAST_REPLICA_BYTES)?;
        let mut places = Places::with_capacity(count);
        for _ in 0..count {
            let segment = SegmentId(self.varint32("segment")?);
            places.push((segment, Offset(self.varint()?)));
        }
        Ok(places)
    }

    fn key(&mut self) -> Result<(NamespaceId, Key), DecodeError> {
        let Entry { namespace, affixes } = self.entry()?;
        let Some((prefix, suffix)) = affixes else {
            let text = self.text()?;
            let key = Key::parse(text).map_err(|_| bad("key length", text.len() as u64))?;
            return match key.as_ref() {
                KeyRef::Text(_) => Ok((namespace, key)),
                KeyRef::Digest { .. } => Err(bad("text key with a digest", 0)),
            };
        };
        let digest = self.reader.array()?;
        let key = KeyRef::Digest {
            prefix,
            suffix,
            digest,
        };
        Ok((namespace, key.to_key()))
    }

    fn entry(&mut self) -> Result<Entry<'a>, DecodeError> {
        let number = self.varint()?;
        let known = usize::try_from(number)
            .ok()
            .and_then(|n| self.entries.get(n));
        if let Some(entry) = known {
            return Ok(*entry);
        }
        if number != self.entries.len() as u64 {
            return Err(bad("dictionary entry", number));
        }
        let namespace = NamespaceId(self.varint32("namespace")?);
        let affixes = match self.reader.u8()? {
            PLAIN_DIGEST => Some(("", "")),
            AFFIXED_DIGEST => {
                let (prefix, suffix) = (self.text()?, self.text()?);
                let length = prefix.len() + 64 + suffix.len();
                if length > MAX_KEY_BYTES {
                    return Err(bad("key length", length as u64));
                }
                Some((prefix, suffix))
            }
            TEXT => None,
            other => return Err(bad("key form", other.into())),
        };
        let entry = Entry { namespace, affixes };
        self.entries.push(entry);
        Ok(entry)
    }

    fn version(&mut self) -> Result<Version, DecodeError> {
        let folded = self.varint()?;
        let distance = (folded >> 1) ^ (folded & 1).wrapping_neg();
        self.version = Version(self.version.0.wrapping_add(distance));
        Ok(self.version)
    }

    fn node(&mut self) -> Result<NodeName, DecodeError> {
        Ok(NodeName(self.text()?.to_owned()))
    }

    fn incarnation(&mut self) -> Result<Incarnation, DecodeError> {
        Ok(Incarnation(self.reader.u128()?))
    }

    fn text(&mut self) -> Result<&'a str, DecodeError> {
        let length = self.count("text length", 1)?;
        let bytes = self.reader.take(length)?;
        std::str::from_utf8(bytes).map_err(|_| DecodeError::NotUtf8 { what: "records" })
    }

    /// A count of elements of at least `least` bytes each, all of which must be present.
    fn count(&mut self, what: &'static str, least: usize) -> Result<usize, DecodeError> {
        let count = self.varint()?;
        usize::try_from(count)
            .ok()
            .filter(|n| {
                n.checked_mul(least)
                    .is_some_and(|all| all <= self.reader.remaining())
            })
            .ok_or(bad(what, count))
    }

    fn varint32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        let value = self.varint()?;
        u32::try_from(value).map_err(|_| bad(what, value))
    }

    fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.reader.u8()?;
            let bits = u64::from(byte & 0x7f);
            if (bits << shift) >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(bad("number of more than 64 bits", value))
    }
}

const fn bad(what: &'static str, value: u64) -> DecodeError {
    DecodeError::BadValue { what, value }
}
