//! Encoding of records.

use super::{
    AFFIXED_DIGEST, COMMIT, Commit, EVERYWHERE, EXTENDED, FORMAT, HARD_PIN, HAS_LATER_FIELDS,
    HAS_PARENT, HAS_PLACES, INCARNATION_DROPPED, NAMESPACE, PARENT_IS_PREVIOUS, PLAIN_DIGEST,
    REMOVE, REPLICA_GONE, REQUIRED, Record, SEED, SEGMENT, SEGMENT_GONE, TEXT, UNLEASED,
    VERSIONS_GRANTED, crc, extended,
};
use bytes::Bytes;
use hashbrown::Equivalent;
use kvpool_seams::maps::HashMap;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{ChecksumAlgorithm, Key, KeyRef, NodeName, Offset, Version};

/// The size at which a chunk of a snapshot ends. Its last record may exceed it.
const CHUNK_BYTES: usize = 256 << 10;

/// Encodes one group of the log or one chunk of a snapshot.
#[derive(Debug, Default)]
pub struct Encoder {
    body: Vec<u8>,
    count: u64,
    entries: HashMap<Entry, u64>,
    /// The entry of one namespace's digests without affixes.
    bare: Option<(NamespaceId, u64)>,
    version: Version,
    previous: Option<(NamespaceId, Key)>,
}

/// An entry of the dictionary: `affixes` is `None` for texts.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Entry {
    namespace: NamespaceId,
    affixes: Option<(Box<str>, Box<str>)>,
}

/// An [`Entry`] for a lookup: it has the same hash, field by field.
#[derive(Hash)]
struct EntryRef<'a> {
    namespace: NamespaceId,
    affixes: Option<(&'a str, &'a str)>,
}

impl Equivalent<Entry> for EntryRef<'_> {
    fn equivalent(&self, entry: &Entry) -> bool {
        let affixes = entry
            .affixes
            .as_ref()
            .map(|(p, s)| (p.as_ref(), s.as_ref()));
        self.namespace == entry.namespace && self.affixes == affixes
    }
}

impl Encoder {
    /// The bytes written so far, without the head and the CRC.
    pub const fn len(&self) -> usize {
        self.body.len()
    }

    /// True when nothing was written.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Appends a record.
    pub fn push(&mut self, record: &Record) {
        self.count += 1;
        match record {
            Record::Commit(commit) => self.commit(commit),
            Record::Remove(remove) => {
                let mut flags = 0;
                if remove.unleased {
                    flags |= UNLEASED;
                }
                if remove.everywhere {
                    flags |= EVERYWHERE;
                }
                let mut places = Vec::new();
                if !remove.places.is_empty() {
                    flags |= HAS_PLACES;
                    put_varint(&mut places, remove.places.len() as u64);
                    for (segment, offset) in &remove.places {
                        put_varint(&mut places, segment.0.into());
                        put_varint(&mut places, offset.0);
                    }
                }
                let later = if flags == 0 { 0 } else { HAS_LATER_FIELDS };
                self.body.push(REMOVE | later);
                self.key(remove.namespace, &remove.key);
                self.version(remove.version);
                if flags != 0 {
                    self.varint(1 + places.len() as u64);
                    self.body.push(flags);
                    self.body.extend_from_slice(&places);
                }
            }
            Record::ReplicaGone(gone) => {
                let mut offset = Vec::new();
                if let Some(Offset(at)) = gone.offset {
                    put_varint(&mut offset, at);
                }
                let later = if offset.is_empty() {
                    0
                } else {
                    HAS_LATER_FIELDS
                };
                self.body.push(REPLICA_GONE | later);
                self.key(gone.namespace, &gone.key);
                self.version(gone.version);
                self.varint(gone.segment.0.into());
                if !offset.is_empty() {
                    self.varint(offset.len() as u64);
                    self.body.extend_from_slice(&offset);
                }
            }
            Record::Namespace(created) => {
                self.body.push(NAMESPACE);
                self.varint(created.id.0.into());
                let fields = &created.namespace;
                self.text(&fields.name);
                self.text(&fields.model);
                self.text(&fields.dtype);
                self.text(&fields.parallel_rank);
                self.text(&fields.salt);
            }
            Record::Segment(segment) => {
                self.body.push(SEGMENT);
                self.varint(segment.id.0.into());
                self.node(&segment.node);
                self.body.extend_from_slice(&segment.incarnation.to_bytes());
                self.varint(segment.index.into());
                self.varint(segment.size.0);
            }
            Record::SegmentGone(gone) => {
                self.body.push(SEGMENT_GONE);
                self.varint(gone.id.0.into());
            }
            Record::IncarnationDropped(dropped) => {
                self.body.push(INCARNATION_DROPPED);
                self.node(&dropped.node);
                self.body.extend_from_slice(&dropped.incarnation.to_bytes());
            }
            Record::Seed(secret) => {
                self.body.push(SEED);
                self.body.extend_from_slice(&secret.seed.to_le_bytes());
            }
            Record::VersionsGranted(granted) => {
                self.body.push(VERSIONS_GRANTED);
                self.varint(granted.until.0);
            }
            Record::SegmentsGranted(_)
            | Record::Medium(_)
            | Record::ReplicaAdded(_)
            | Record::NamespaceSet(_)
            | Record::NamespaceGone(_)
            | Record::LeasedRanges(_)
            | Record::UnleasedRanges(_) => {
                self.extended(record);
            }
        }
    }

    /// A record of a kind since format 1, with the version that writes it. A reader that does not
    /// know the kind can name that version.
    fn extended(&mut self, record: &Record) {
        let Some((head, fields)) = extended::encode(record) else {
            return;
        };
        let required = if head.is_required { REQUIRED } else { 0 };
        self.body.push(EXTENDED | required);
        self.varint(head.kind);
        self.text(env!("CARGO_PKG_VERSION"));
        self.varint(fields.len() as u64);
        self.body.extend_from_slice(&fields);
    }

    /// The finished group. `shards` is 0 in the log.
    pub fn finish(self, shards: u32) -> Bytes {
        let mut out = Vec::with_capacity(self.body.len() + 32);
        out.extend_from_slice(&[FORMAT, ChecksumAlgorithm::Crc64Nvme as u8]);
        put_varint(&mut out, shards.into());
        put_varint(&mut out, self.count);
        out.extend_from_slice(&self.body);
        let crc = crc(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out.into()
    }

    fn commit(&mut self, commit: &Commit) {
        let parent_is_previous = match (&commit.parent, &self.previous) {
            (Some(parent), Some((namespace, key))) => {
                *namespace == commit.namespace && key == parent
            }
            _ => false,
        };
        let mut tag = COMMIT;
        if commit.hard_pin {
            tag |= HARD_PIN;
        }
        if parent_is_previous {
            tag |= PARENT_IS_PREVIOUS;
        } else if commit.parent.is_some() {
            tag |= HAS_PARENT;
        }
        self.body.push(tag);
        self.key(commit.namespace, &commit.key);
        self.version(commit.version);
        self.varint(commit.length.0);
        self.body
            .extend_from_slice(&commit.checksum.0.to_le_bytes());
        self.varint(commit.replicas.len() as u64);
        for (segment, offset) in &commit.replicas {
            self.varint(segment.0.into());
            self.varint(offset.0);
        }
        if let (Some(parent), false) = (&commit.parent, parent_is_previous) {
            self.key(commit.namespace, parent);
        }
        self.previous = Some((commit.namespace, commit.key.clone()));
    }

    fn key(&mut self, namespace: NamespaceId, key: &Key) {
        let key = key.as_ref();
        let affixes = match key {
            KeyRef::Digest { prefix, suffix, .. } => Some((prefix, suffix)),
            KeyRef::Text(_) => None,
        };
        // Nearly all keys of a group are digests without affixes, in one namespace.
        let is_bare = affixes == Some(("", ""));
        let bare = self.bare.filter(|(of, _)| is_bare && *of == namespace);
        let known = bare.map(|(_, entry)| entry);
        let known = known.or_else(|| self.entries.get(&EntryRef { namespace, affixes }).copied());
        if let Some(entry) = known {
            put_varint(&mut self.body, entry);
        } else {
            let entry = self.entries.len() as u64;
            self.varint(entry);
            self.varint(namespace.0.into());
            match affixes {
                None => self.body.push(TEXT),
                Some(("", "")) => self.body.push(PLAIN_DIGEST),
                Some((prefix, suffix)) => {
                    self.body.push(AFFIXED_DIGEST);
                    self.text(prefix);
                    self.text(suffix);
                }
            }
            if is_bare {
                self.bare = Some((namespace, entry));
            }
            let affixes = affixes.map(|(prefix, suffix)| (prefix.into(), suffix.into()));
            self.entries.insert(Entry { namespace, affixes }, entry);
        }
        match key {
            KeyRef::Digest { digest, .. } => self.body.extend_from_slice(digest),
            KeyRef::Text(text) => self.text(text),
        }
    }

    /// Writes the distance from the version before, wrapped and folded so that a short step back
    /// costs as little as a short step on.
    fn version(&mut self, version: Version) {
        let distance = version.0.wrapping_sub(self.version.0).cast_signed();
        self.varint(((distance << 1) ^ (distance >> 63)).cast_unsigned());
        self.version = version;
    }

    fn node(&mut self, node: &NodeName) {
        self.text(&node.0);
    }

    fn text(&mut self, text: &str) {
        self.varint(text.len() as u64);
        self.body.extend_from_slice(text.as_bytes());
    }

    fn varint(&mut self, value: u64) {
        put_varint(&mut self.body, value);
    }
}

/// Writes 7 bits in each byte, the lowest first. The top bit says that more follow.
fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let [low, ..] = value.to_le_bytes();
        value >>= 7;
        if value == 0 {
            out.push(low & 0x7f);
            return;
        }
        out.push(low | 0x80);
    }
}

/// Encodes one group of the log.
pub fn encode_group<'a>(records: impl IntoIterator<Item = &'a Record>) -> Bytes {
    let mut encoder = Encoder::default();
    for record in records {
        encoder.push(record);
    }
    encoder.finish(0)
}

/// The chunks of a snapshot of one of `shards` shards. There is at least one chunk, so that the
/// number of shards is always stored.
pub fn encode_snapshot(shards: u32, records: impl IntoIterator<Item = Record>) -> Vec<Bytes> {
    let mut chunks = Vec::new();
    let mut encoder = Encoder::default();
    for record in records {
        encoder.push(&record);
        if encoder.len() >= CHUNK_BYTES {
            chunks.push(std::mem::take(&mut encoder).finish(shards));
        }
    }
    if chunks.is_empty() || !encoder.is_empty() {
        chunks.push(encoder.finish(shards));
    }
    chunks
}
