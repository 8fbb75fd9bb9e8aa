//! One file of the log: a head, then frames in space that was written before.
//!
//! A segment has its full size from the start. An append overwrites bytes, so it needs no space and
//! only one flush. A file that is shorter than its head says is damaged.

use super::files;
use super::frame::{self, HEAD, Head, Kind};
use super::identity::StoreId;
use crate::store::record::crc;
use crate::store::{LogSeq, StoreError};
use bytes::Bytes;
use kvpool_types::Epoch;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: u64 = u64::from_le_bytes(*b"KVPLOG2\n");
/// The offset of the first frame.
pub(super) const FIRST: u64 = 4096;
/// The bytes of the head in use.
const HEADER: usize = 88;
/// Room at the end that groups leave for the frames that record the cut and the next segment.
pub(super) const RESERVE: u64 = 1024;

/// The head of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) store: StoreId,
    pub(super) number: u64,
    /// The position of the first group.
    pub(super) first: LogSeq,
    /// The log's cut when the segment was begun.
    pub(super) cut: LogSeq,
    pub(super) size: u64,
    pub(super) salt: u64,
}

impl Header {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&self.store.0.to_le_bytes());
        for word in [
            self.number,
            self.first.0,
            self.cut.0,
            self.size,
            self.salt,
            0,
            0,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let own = crc(&out);
        out.extend_from_slice(&own.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (covered, own) = bytes.get(..HEADER)?.split_at_checked(HEADER - 8)?;
        if u64::from_le_bytes(own.try_into().ok()?) != crc(covered) {
            return None;
        }
        let mut words = covered.as_chunks::<8>().0.iter().copied();
        let mut word = || words.next().map(u64::from_le_bytes);
        if word()? != MAGIC {
            return None;
        }
        let (low, high) = (word()?, word()?);
        Some(Self {
            store: StoreId(u128::from(low) | u128::from(high) << 64),
            number: word()?,
            first: LogSeq(word()?),
            cut: LogSeq(word()?),
            size: word()?,
            salt: word()?,
        })
    }
}

/// The name of a segment's file.
pub(super) fn name(number: u64) -> String {
    format!("{number:016}.log")
}

/// The number in the name of a segment's file.
pub(super) fn number_of(path: &Path) -> Option<u64> {
    if path.extension()? != "log" {
        return None;
    }
    path.file_stem()?.to_str()?.parse().ok()
}

/// The location of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupPosition {
    pub(super) seq: LogSeq,
    at: usize,
    length: usize,
}

/// The content of a segment that was read.
pub(super) struct Read {
    pub(super) header: Header,
    pub(super) groups: Vec<GroupPosition>,
    pub(super) epoch: Epoch,
    /// The largest cut that a frame records.
    pub(super) cut: LogSeq,
    /// The offset of the next frame.
    pub(super) end: u64,
    /// True when another segment follows.
    pub(super) goes_on: bool,
    /// The bytes from the start of this frame to the start of the next one.
    pub(super) torn: bool,
    bytes: Vec<u8>,
}

impl Read {
    /// The position of the last group, or the one before the first.
    pub(super) fn last(&self) -> LogSeq {
        self.groups
            .last()
            .map_or(LogSeq(self.header.first.0.saturating_sub(1)), |g| g.seq)
    }

    /// Writes the bytes that were read again, and flushes them.
    ///
    /// A failed flush marks pages of the page cache as clean although the disk lacks them. A later
    /// flush alone does not write them. If a kvmaster is killed after such a flush, the next start
    /// must write them.
    pub(super) fn make_durable(&self, path: &Path) -> io::Result<()> {
        let file = File::options().write(true).open(path)?;
        let end = usize::try_from(self.end).ok();
        let used = end.and_then(|end| self.bytes.get(..(end + HEAD).min(self.bytes.len())));
        file.write_all_at(used.unwrap_or(&self.bytes), 0)?;
        file.sync_data()
    }

    /// The bytes of a group.
    pub(super) fn group(&self, place: GroupPosition) -> Bytes {
        let body = self.bytes.get(place.at..place.at + place.length);
        Bytes::copy_from_slice(body.unwrap_or_default())
    }
}

/// Reads a segment and checks every frame. An error names the file and the position.
pub(super) fn read(path: &Path) -> Result<Read, StoreError> {
    let damaged = |reason: String| StoreError::Corrupt {
        reason: format!("{}: {reason}", path.display()),
    };
    let bytes = std::fs::read(path).map_err(|error| StoreError::Unavailable {
        reason: format!("{}: {error}", path.display()),
    })?;
    let Some(header) = Header::decode(&bytes) else {
        return Err(damaged(if bytes.is_empty() {
            "the file is empty".into()
        } else {
            "the file does not begin like a segment of the log".into()
        }));
    };
    if bytes.len() as u64 != header.size {
        let (is, was) = (bytes.len(), header.size);
        return Err(damaged(format!(
            "the file has {is} bytes, {was} were written"
        )));
    }
    let mut read = Read {
        header,
        groups: Vec::new(),
        epoch: Epoch(0),
        cut: header.cut,
        end: FIRST,
        goes_on: false,
        torn: false,
        bytes,
    };
    while let Some((head, body)) = frame_at(&read.bytes, read.end, header.salt) {
        let at = read.end;
        match head.kind {
            Kind::Group => {
                let expected = read.last().next();
                if head.seq != expected {
                    let found = head.seq;
                    return Err(damaged(format!(
                        "group {found} lies at byte {at} where group {expected} belongs"
                    )));
                }
                read.groups.push(GroupPosition {
                    seq: head.seq,
                    at: body,
                    length: head.length as usize,
                });
            }
            Kind::Cut => read.cut = read.cut.max(head.seq),
            Kind::End => return Ok(read),
            Kind::Next => {
                read.goes_on = true;
                return Ok(read);
            }
        }
        read.epoch = read.epoch.max(head.epoch);
        read.end += head.span();
    }
    // An append begins after the append before it is durable, so no frame follows a torn append.
    let rest = usize::try_from(read.end).ok();
    let rest = rest.and_then(|end| read.bytes.get(end..));
    let rest = rest.unwrap_or_default();
    let first_span = Head::read(rest, header.salt).map_or(8, |head| head.span());
    let behind = usize::try_from(first_span).ok();
    let behind = behind.and_then(|from| rest.get(from..)).unwrap_or_default();
    if frame::is_any_in(behind, header.salt) {
        let (at, group) = (read.end, read.last().next());
        return Err(damaged(format!(
            "group {group} at byte {at} is damaged, and the log continues behind it"
        )));
    }
    read.torn = rest.starts_with(&header.salt.to_le_bytes());
    Ok(read)
}

/// The whole frame that begins at `at`, and the offset of its body.
fn frame_at(bytes: &[u8], at: u64, salt: u64) -> Option<(Head, usize)> {
    let start = usize::try_from(at).ok()?;
    let head = Head::read(bytes.get(start..)?, salt)?;
    let body = start + HEAD;
    let held = bytes.get(body..body.checked_add(head.length as usize)?)?;
    head.holds(held).then_some((head, body))
}

/// Opens the spare if it has the size of a segment.
fn open_spare(spare: PathBuf, size: u64) -> io::Result<(PathBuf, File)> {
    let file = File::options().read(true).write(true).open(&spare)?;
    if file.metadata()?.len() == size {
        Ok((spare, file))
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// The segment for appends.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) header: Header,
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// The offset of the next frame.
    pub(super) end: u64,
    buffer: Vec<u8>,
}

impl Active {
    /// Continues a segment that was read.
    pub(super) fn resume(path: PathBuf, header: Header, end: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(&path)?;
        Ok(Self {
            header,
            path,
            file,
            end,
            buffer: Vec::new(),
        })
    }

    /// Begins a segment in the spare file or in a new file, and makes it durable.
    pub(super) fn begin(
        directory: &Path,
        header: Header,
        spare: Option<PathBuf>,
    ) -> io::Result<Self> {
        let path = directory.join(name(header.number));
        let file = match spare.map(|spare| open_spare(spare, header.size)) {
            Some(Ok((spare, file))) => {
                // Without this flush, a power cut could give the file its old name together with
                // the new head.
                files::sync_directory(directory)?;
                file.write_all_at(&header.encode(), 0)?;
                file.sync_data()?;
                std::fs::rename(&spare, &path)?;
                files::sync_directory(directory)?;
                file
            }
            // The spare was removed or changed. A new file serves as well.
            Some(Err(_)) | None => {
                files::replace(&path, |file| {
                    files::fill(file, header.size)?;
                    file.write_all_at(&header.encode(), 0)
                })?;
                File::options().read(true).write(true).open(&path)?
            }
        };
        Ok(Self {
            header,
            path,
            file,
            end: FIRST,
            buffer: Vec::new(),
        })
    }

    /// True when a frame with a body of `length` bytes fits. A group leaves the reserve.
    pub(super) const fn fits(&self, kind: Kind, length: u64) -> bool {
        let kept = match kind {
            Kind::Group => RESERVE,
            // A further frame must record that the log continues, so this frame leaves room for it.
            Kind::Cut => 2 * HEAD as u64,
            Kind::End | Kind::Next => 0,
        };
        self.end + frame::span(length) + kept <= self.header.size
    }

    /// Writes a frame after the last one and makes it durable. After a failure the frame is absent.
    ///
    /// # Errors
    ///
    /// The outer error: it is unknown whether the frame is present.
    pub(super) fn append(
        &mut self,
        kind: Kind,
        seq: LogSeq,
        epoch: Epoch,
        body: &[u8],
    ) -> io::Result<io::Result<()>> {
        let Some(head) = Head::of(kind, seq, epoch, body) else {
            return Ok(Err(io::ErrorKind::FileTooLarge.into()));
        };
        head.write(self.header.salt, body, &mut self.buffer);
        let written = self
            .file
            .write_all_at(&self.buffer, self.end)
            .and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // The disk's content is unknown now. Once a head of zeros is durable, the frame is
            // absent.
            self.file.write_all_at(&[0; HEAD], self.end)?;
            self.file.sync_data()?;
            return Ok(Err(error));
        }
        self.end += head.span();
        // A group of a megabyte is rare, so its buffer is not kept.
        if self.buffer.capacity() > 1 << 18 {
            self.buffer = Vec::new();
        }
        Ok(Ok(()))
    }

    /// Marks that every frame so far is durable. The mark itself is not flushed. It only helps to
    /// distinguish a frame that was changed later from a torn append.
    pub(super) fn mark_end(&mut self, seq: LogSeq, epoch: Epoch) -> io::Result<()> {
        match Head::of(Kind::End, seq, epoch, &[]) {
            Some(head) if self.fits(Kind::End, 0) => {
                head.write(self.header.salt, &[], &mut self.buffer);
                self.file.write_all_at(&self.buffer, self.end)
            }
            _ => Ok(()),
        }
    }
}
