//! Files that are there whole or not at all, and what the system says when it cannot write them.

use crate::store::StoreError;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The ending of a file that is being written. Only one under its own name counts.
pub(super) const PARTIAL: &str = "partial";

/// Makes the entries of a directory durable.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Puts a file in place of what has its name, in one step, durably: a reader and a crash see the one or
/// the other. What could not be finished is removed.
pub(super) fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let partial = path.with_extension(PARTIAL);
    let written = File::create(&partial)
        .and_then(|file| write(&file).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&partial, path));
    if let Err(error) = written {
        // It is no more than room that would be missed.
        let _removed = std::fs::remove_file(&partial);
        return Err(error);
    }
    path.parent().map_or(Ok(()), sync_directory)
}

/// Removes a file; one that is not there is no failure.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a file of `size` zero bytes, written and not only reserved: writing into it later neither needs
/// room nor changes what the filesystem knows of it.
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

/// Whether the system has said that there is no room.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded
    )
}

/// What a failed call means for a store in `directory`. For calls after which nothing has changed.
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
