//! What an exit code means, and which one an error leads to.

use crate::output::Format;
use kvpool_types::Key;
use serde::Serialize;

/// All of it, for `--help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0    done
  1    failed; the message says why
  2    the command line is wrong
  3    a key is not in the pool
  4    the pool cannot be reached
  5    bytes came back that are not those that were put
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

/// The error of a key that is not in the pool; programs are also told on standard output.
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

/// The command line names something that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// The pool cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unreachable(pub(crate) String);

/// Bytes came back that are not those that were put.
#[derive(Debug, thiserror::Error)]
#[error("{blocks} blocks came back with wrong bytes")]
pub(crate) struct WrongBytes {
    /// How many blocks.
    pub(crate) blocks: u64,
}

/// The exit code that `error` leads to.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    if error.is::<WrongBytes>() {
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
    fn errors_lead_to_the_codes_that_help_tells() {
        let wrong = WrongBytes { blocks: 1 };
        assert_eq!(code(&wrong.into()), 5);
        assert_eq!(code(&Usage("a".to_owned()).into()), 2);
        assert_eq!(code(&Missing("a".to_owned()).into()), 3);
        assert_eq!(code(&Unreachable("a".to_owned()).into()), 4);
        assert_eq!(code(&anyhow::anyhow!("a")), 1);
        let told = Err::<(), _>(Missing("a".to_owned())).context("what was done");
        assert_eq!(code(&told.unwrap_err()), 3, "also behind a context");
    }
}
