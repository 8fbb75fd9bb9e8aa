//! Files whose permissions are checked: secrets, and files that decide rights.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The largest file that is read here, in bytes.
const MOST: u64 = 4 << 20;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretFileError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Others may change the file.
    #[error("{} can be written by everybody: run chmod o-w on it", path.display())]
    WritableByOthers {
        /// The file.
        path: PathBuf,
    },
    /// Others may read the secret.
    #[error("{} holds a secret that others can read: run chmod 600 on it", path.display())]
    ReadableByOthers {
        /// The file.
        path: PathBuf,
    },
}

/// Whether users other than the owner and the group can read the file with this mode.
pub const fn is_readable_by_others(mode: u32) -> bool {
    mode & 0o004 != 0
}

fn failed(path: &Path) -> impl Fn(io::Error) -> SecretFileError {
    let path = path.to_owned();
    move |source| SecretFileError::Io {
        path: path.clone(),
        source,
    }
}

/// Reads a file that decides rights. A file that everybody may write is refused.
pub(crate) fn read_trusted(path: &Path) -> Result<String, SecretFileError> {
    let (text, mode) = read(path)?;
    if mode & 0o002 != 0 {
        let path = path.to_owned();
        return Err(SecretFileError::WritableByOthers { path });
    }
    Ok(text)
}

/// Reads a file with a key. A file that others may read is refused.
pub(crate) fn read_secret(path: &Path) -> Result<String, SecretFileError> {
    let (text, mode) = read(path)?;
    if mode & 0o077 != 0 {
        let path = path.to_owned();
        return Err(SecretFileError::ReadableByOthers { path });
    }
    Ok(text)
}

/// The text of a file, and its mode.
pub(crate) fn read(path: &Path) -> Result<(String, u32), SecretFileError> {
    let file = File::open(path).map_err(failed(path))?;
    let mode = file.metadata().map_err(failed(path))?.mode();
    let mut text = String::new();
    let read = file.take(MOST).read_to_string(&mut text);
    read.map_err(failed(path))?;
    Ok((text, mode))
}

/// Writes a file in one step, so that a reader never sees a part of it.
pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<(), SecretFileError> {
    let partial = path.with_extension("partial");
    let written = || {
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(&partial)?;
        // A file that was there before keeps its mode.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    written().map_err(failed(path))
}
