//! The exit codes, and the errors that carry them.

use crate::output::Format;
use kvpool_types::Key;
use serde::Serialize;

/// The list of exit codes for `--help`.
pub const HELP: &str = "\
Exit codes:
  0    success
  1    failure; the message says why
  2    invalid command line
  3    a key is not in the pool
  4    the pool cannot be reached
  5    data corruption: a block's bytes differ from what was put
  130  interrupted";

const FAILED: u8 = 1;
const USAGE: u8 = 2;
const MISSING: u8 = 3;
const UNREACHABLE: u8 = 4;
const WRONG_BYTES: u8 = 5;

/// The exit code of a command that was interrupted, as shells number it.
pub(crate) const INTERRUPTED: u8 = 130;

/// A key is not in the pool.
#[derive(Debug, thiserror::Error)]
#[error("not in the pool: {0}")]
pub(crate) struct Missing(pub(crate) String);

/// The error of a missing key. With `--output json` it also prints the key as absent.
pub(crate) fn missing(key: &Key, output: Format) -> anyhow::Error {
    #[derive(Serialize)]
    struct Absent {
        key: String,
        present: bool,
    }
    let key = key.to_string();
    if output == Format::Json {
        let absent = Absent {
            key: key.clone(),
            present: false,
        };
        if let Err(error) = output.show(&absent, |_| String::new()) {
            return error;
        }
    }
    Missing(key).into()
}

/// An argument that passed parsing is invalid.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The pool cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreachable(pub String);

/// Blocks whose bytes differ from the bytes that were put.
#[derive(Debug, thiserror::Error)]
#[error("data corruption: {blocks} blocks differ from what was put")]
pub struct WrongBytes {
    /// The number of blocks.
    pub blocks: u64,
}

/// Blocks that a pool did not have although they were leased.
#[derive(Debug, thiserror::Error)]
#[error("{blocks} blocks were lost although they were leased")]
pub(crate) struct LeasedLost {
    /// The number of blocks.
    pub(crate) blocks: u64,
}

/// A run that was to verify blocks and got none.
#[derive(Debug, thiserror::Error)]
#[error(
    "no block was verified: the report counts the blocks that were put, refused, missing and failed"
)]
pub(crate) struct NothingVerified;

/// A medium with damaged extents.
#[derive(Debug, thiserror::Error)]
#[error("data corruption: {damaged} places of {path} are damaged")]
pub(crate) struct DamagedMedium {
    pub(crate) path: String,
    pub(crate) damaged: u64,
}

/// The exit code of `error`.
pub fn code(error: &anyhow::Error) -> u8 {
    if error.is::<WrongBytes>() || error.is::<DamagedMedium>() {
        WRONG_BYTES
    } else if error.is::<Usage>() {
        USAGE
    } else if error.is::<Missing>() {
        MISSING
    } else if error.is::<Unreachable>() {
        UNREACHABLE
    } else {
        FAILED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn errors_have_the_exit_codes_of_help() {
        let wrong = WrongBytes { blocks: 1 };
        assert_eq!(code(&wrong.into()), 5);
        let damaged = DamagedMedium {
            path: "a".to_owned(),
            damaged: 1,
        };
        assert_eq!(code(&damaged.into()), 5);
        assert_eq!(code(&Usage("a".to_owned()).into()), 2);
        assert_eq!(code(&Missing("a".to_owned()).into()), 3);
        assert_eq!(code(&Unreachable("a".to_owned()).into()), 4);
        assert_eq!(code(&anyhow::anyhow!("a")), 1);
        let told = Err::<(), _>(Missing("a".to_owned())).context("what was done");
        assert_eq!(code(&told.unwrap_err()), 3, "also behind a context");
    }
}
