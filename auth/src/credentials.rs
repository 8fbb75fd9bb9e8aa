//! The caller's side: a token that is read again before it expires.

use crate::claims::peek;
use crate::secret_file::{is_readable_by_others, read};
use kvpool_types::Token;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The environment variable that names the file with the token.
const TOKEN_FILE_VARIABLE: &str = "KVPOOL_TOKEN_FILE";
/// The file with the token that the environment names.
pub fn token_file_of_environment() -> Option<PathBuf> {
    let path = std::env::var_os(TOKEN_FILE_VARIABLE)?;
    (!path.is_empty()).then(|| path.into())
}

/// The token files that this process has warned of: each of its clients and daemons reads one.
static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// The token of a caller: none, a fixed one, or one from a file that somebody renews.
#[derive(Clone, Default)]
pub struct Credentials(Kind);

#[derive(Clone, Default)]
enum Kind {
    #[default]
    None,
    Fixed(Token),
    File(Arc<TokenFile>),
}

/// The token now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Current {
    /// The token; empty for none.
    pub token: Token,
    /// Rises whenever the token changes.
    pub number: u64,
}

struct TokenFile {
    path: PathBuf,
    state: RwLock<State>,
}

struct State {
    current: Current,
    looked: Instant,
    /// Why the file could not be read, the last time.
    failure: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::None => f.write_str("Credentials(none)"),
            Kind::Fixed(_) => f.write_str("Credentials(..)"),
            Kind::File(file) => write!(f, "Credentials({})", file.path.display()),
        }
    }
}

impl Credentials {
    /// The fixed `token`; none when it is empty.
    pub fn fixed(token: Token) -> Self {
        Self(if token.as_str().is_empty() {
            Kind::None
        } else {
            Kind::Fixed(token)
        })
    }

    /// The token in the file at `path`. A file that cannot be read now may come later.
    pub fn file(path: &Path) -> Self {
        let file = TokenFile {
            path: path.to_owned(),
            state: RwLock::new(State {
                current: Current {
                    token: Token::default(),
                    number: 0,
                },
                looked: Instant::now(),
                failure: None,
            }),
        };
        file.look(true);
        Self(Kind::File(Arc::new(file)))
    }

    /// Whether there is no token, and none will come.
    pub const fn is_none(&self) -> bool {
        matches!(self.0, Kind::None)
    }

    /// The token now. The file is looked at once a second at most.
    pub fn current(&self) -> Current {
        match &self.0 {
            Kind::None => Current {
                token: Token::default(),
                number: 0,
            },
            Kind::Fixed(token) => Current {
                token: token.clone(),
                number: 1,
            },
            Kind::File(file) => file.with_current(Current::clone),
        }
    }

    /// The number of the token now: rises whenever the token changes.
    pub fn number(&self) -> u64 {
        match &self.0 {
            Kind::None => 0,
            Kind::Fixed(_) => 1,
            Kind::File(file) => file.with_current(|current| current.number),
        }
    }

    /// Reads the file at once, because the token of number `refused` was refused. Returns whether there
    /// is another one now.
    pub fn renewed(&self, refused: u64) -> bool {
        match &self.0 {
            Kind::File(file) => {
                if file.state.read().current.number == refused {
                    file.look(false);
                }
                file.state.read().current.number != refused
            }
            _ => false,
        }
    }
}

impl TokenFile {
    fn with_current<T>(&self, take: impl FnOnce(&Current) -> T) -> T {
        let is_due = self.state.read().looked.elapsed() >= LOOK;
        if is_due {
            self.look(false);
        }
        take(&self.state.read().current)
    }

    /// Reads the file. What cannot be read, and an empty file, changes nothing.
    fn look(&self, is_first: bool) {
        self.state.write().looked = Instant::now();
        let path = self.path.display();
        let failure = match read(&self.path) {
            Ok((text, mode)) => {
                if is_first
                    && is_readable_by_others(mode)
                    && WARNED.lock().insert(self.path.clone())
                {
                    tracing::warn!(%path, "others can read the token file: run chmod 600 on it");
                }
                let text = text.trim();
                let mut state = self.state.write();
                if !text.is_empty() {
                    if state.current.token.as_str() != text {
                        state.current.token = Token::from(text.to_owned());
                        state.current.number += 1;
                        let expires = peek(text).and_then(|claims| claims.get("exp")?.as_u64());
                        tracing::debug!(%path, expires, "token read");
                    }
                    state.failure = None;
                    return;
                }
                "it is empty".to_owned()
            }
            Err(error) => error.to_string(),
        };
        let mut state = self.state.write();
        if state.failure.as_ref() != Some(&failure) {
            let rest = match state.current.number {
                0 => "there is no token",
                _ => "the token before stays",
            };
            tracing::warn!(%path, failure, rest, "token file cannot be used");
            state.failure = Some(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewed_file_gives_the_new_token_and_a_bad_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let credentials = Credentials::file(&path);
        assert_eq!(credentials.current().number, 0);
        assert!(!credentials.renewed(0));
        std::fs::write(&path, "one\n").unwrap();
        assert!(credentials.renewed(0));
        let first = credentials.current();
        assert_eq!((first.token.as_str(), first.number), ("one", 1));
        std::fs::write(&path, "\n").unwrap();
        assert!(!credentials.renewed(1));
        std::fs::write(&path, "two").unwrap();
        assert!(credentials.renewed(1));
        assert_eq!(credentials.current().token.as_str(), "two");
        assert!(!format!("{credentials:?}").contains("two"));
    }

    #[test]
    fn the_file_is_looked_at_again_within_two_seconds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "one").unwrap();
        let credentials = Credentials::file(&path);
        std::fs::write(&path, "two").unwrap();
        assert_eq!(credentials.current().token.as_str(), "one");
        std::thread::sleep(LOOK + Duration::from_millis(50));
        assert_eq!(credentials.current().token.as_str(), "two");
    }
}
