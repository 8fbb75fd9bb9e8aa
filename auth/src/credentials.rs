//! The caller's side: a token that is read again before it expires.

use crate::life::TokenLife;
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
/// The token file that the environment names.
pub fn token_file_of_environment() -> Option<PathBuf> {
    let path = std::env::var_os(TOKEN_FILE_VARIABLE)?;
    (!path.is_empty()).then(|| path.into())
}

/// The token files that this process has warned of: each of its clients and daemons reads one.
static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Interval of checks of the file.
const LOOK: Duration = Duration::from_secs(1);

/// The token of a caller: none, a fixed token, or the token in a file that another program renews.
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
    /// Rises with each change of the token.
    pub number: u64,
}

struct TokenFile {
    path: PathBuf,
    state: RwLock<State>,
}

struct State {
    current: Current,
    looked: Instant,
    /// Why the last read of the file failed.
    failure: Option<String>,
    /// The times of the token.
    life: Option<TokenLife>,
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
    /// Always shows `token`; none when it is empty.
    pub fn fixed(token: Token) -> Self {
        Self(if token.as_str().is_empty() {
            Kind::None
        } else {
            Kind::Fixed(token)
        })
    }

    /// Shows the token in the file at `path`. A file that cannot be read now may appear later.
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
                life: None,
            }),
        };
        file.look(true);
        Self(Kind::File(Arc::new(file)))
    }

    /// Whether the caller has no token and never gets one.
    pub const fn is_none(&self) -> bool {
        matches!(self.0, Kind::None)
    }

    /// The token now. The file is checked at most once a second.
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

    /// The number of the present token. It rises with each change.
    pub fn number(&self) -> u64 {
        match &self.0 {
            Kind::None => 0,
            Kind::Fixed(_) => 1,
            Kind::File(file) => file.with_current(|current| current.number),
        }
    }

    /// When the token begins and ends; `None` without a token, or if the token does not name its
    /// end.
    pub fn life(&self) -> Option<TokenLife> {
        match &self.0 {
            Kind::None => None,
            Kind::Fixed(token) => TokenLife::of(token.as_str()),
            Kind::File(file) => file.with_state(|state| state.life),
        }
    }

    /// Whether the last read of the file failed.
    pub fn has_failed(&self) -> bool {
        match &self.0 {
            Kind::None | Kind::Fixed(_) => false,
            Kind::File(file) => file.with_state(|state| state.failure.is_some()),
        }
    }

    /// The problem of the token, as a sentence: its file cannot be used, or the token expires soon.
    pub fn problem(&self) -> Option<String> {
        let of_life = |life: Option<TokenLife>| life?.problem(crate::now());
        match &self.0 {
            Kind::None => None,
            Kind::Fixed(_) => of_life(self.life()).map(|said| format!("the token {said}")),
            Kind::File(file) => file.with_state(|state| {
                let path = file.path.display();
                match &state.failure {
                    Some(failure) => {
                        let rest = state.rest();
                        Some(format!(
                            "the token file {path} cannot be used, {rest}: {failure}"
                        ))
                    }
                    None => of_life(state.life)
                        .map(|said| format!("the token in {path} {said}: write a new one there")),
                }
            }),
        }
    }

    /// Reads the file now, because the token with the number `refused` was refused. Returns whether the token has
    /// changed.
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

impl State {
    /// The token that a caller shows while the file cannot be used.
    const fn rest(&self) -> &'static str {
        match self.current.number {
            0 => "there is no token",
            _ => "the token before stays",
        }
    }
}

impl TokenFile {
    fn with_current<T>(&self, take: impl FnOnce(&Current) -> T) -> T {
        self.with_state(|state| take(&state.current))
    }

    fn with_state<T>(&self, take: impl FnOnce(&State) -> T) -> T {
        let is_due = self.state.read().looked.elapsed() >= LOOK;
        if is_due {
            self.look(false);
        }
        take(&self.state.read())
    }

    /// Reads the file. A file that is empty or cannot be read changes nothing.
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
                        state.life = TokenLife::of(text);
                        let expires = state.life.map(|life| life.expires);
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
            let rest = state.rest();
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
    fn a_file_that_cannot_be_used_and_a_near_end_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let credentials = Credentials::file(&path);
        let said = credentials.problem().unwrap();
        assert!(said.contains("there is no token"), "{said}");
        assert!(credentials.has_failed());
        let key = crate::issue::SigningKey::generate().unwrap();
        let write = |begins, expires| {
            let token = crate::issue::NewToken {
                subject: "node",
                issuer: "issuer",
                audience: "kvpool",
                begins,
                expires,
            };
            std::fs::write(&path, key.sign(&token).unwrap()).unwrap();
        };
        let now = crate::now();
        write(now - 86_400, now + 600);
        assert!(credentials.renewed(0));
        let life = credentials.life().unwrap();
        assert_eq!((life.begins, life.expires), (now - 86_400, now + 600));
        let said = credentials.problem().unwrap();
        assert!(said.contains("expires in") && !credentials.has_failed());
        write(now, now + 86_400);
        assert!(credentials.renewed(1));
        assert_eq!(credentials.problem(), None);
        std::fs::write(&path, "\n").unwrap();
        assert!(!credentials.renewed(2));
        let said = credentials.problem().unwrap();
        assert!(
            said.contains("the token before stays: it is empty"),
            "{said}"
        );
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
