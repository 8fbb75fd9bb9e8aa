//! Files that are either whole or absent, and the errors of failed writes.

use crate::store::StoreError;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The suffix of a file that is being written. Readers ignore such files.
pub(super) const PARTIAL: &str = "partial";

/// Makes the entries of a directory durable.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Replaces a file in one step, durably: a reader and a crash see the old or the new file. A failure before the
/// rename removes the partial file.
pub(super) fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let partial = path.with_extension(PARTIAL);
    let written = File::create(&partial)
        .and_then(|file| write(&file).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&partial, path));
    if let Err(error) = written {
        // A partial file that remains only takes space.
        let _removed = std::fs::remove_file(&partial);
        return Err(error);
    }
    path.parent().map_or(Ok(()), sync_directory)
}

/// Removes a file. A missing file is no error.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes `size` zero bytes into a new file. A later write into these blocks needs no space and changes no
/// metadata of the filesystem. So a flush writes only the bytes.
pub(super) fn fill(mut file: &File, size: u64) -> io::Result<()> {
    const STEP: usize = 1 << 20;
    let zeros = vec![0; STEP];
    let mut left = size;
    while left > 0 {
        let step = zeros
            .get(..usize::try_from(left).unwrap_or(STEP).min(STEP))
            .unwrap_or(&zeros);
        file.write_all(step)?;
        left -= step.len() as u64;
    }
    Ok(())
}

/// Whether the error means that the disk is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded
    )
}

/// The store's error for a failed call in `directory`, after which nothing has changed.
pub(super) fn failed(directory: &Path, doing: &str, error: &io::Error) -> StoreError {
    if is_full(error) {
        StoreError::DirectoryFull {
            directory: directory.display().to_string(),
        }
    } else {
        StoreError::Unavailable {
            reason: format!("{}: {doing}: {error}", directory.display()),
        }
    }
}
