//! The verifier of tokens. It has the keys and the policy, and reads their files again after a
//! change.

use crate::claims::{self, TokenError};
use crate::keys::Keys;
use crate::policy::{Identity, Policy, PolicyError};
use crate::secret_file::{SecretFileError, read_trusted};
use crate::settings::AuthSettings;
use parking_lot::{Mutex, RwLock};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval of checks of the files.
const LOOK: Duration = Duration::from_secs(1);
/// The message for a JWKS without a key that can verify a token.
const NO_KEY: &str = "it has no key for signatures with EdDSA (Ed25519), ES256 (P-256) or RS256";
/// The most tokens whose verification is cached.
const MOST_REMEMBERED: usize = 4096;

/// Why tokens cannot be judged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// A file cannot be read, or everybody can write it.
    #[error(transparent)]
    File(#[from] SecretFileError),
    /// The keys cannot be used.
    #[error("{}: {problem}", path.display())]
    Keys {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be used.
        problem: String,
    },
    /// The policy cannot be used.
    #[error("{}: {source}", path.display())]
    Policy {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be used.
        source: PolicyError,
    },
}

/// Verifies tokens. A change of the JWKS or of the policy takes effect within about a second. It also applies to
/// callers that were judged before, because [`Authority::generation`] rises.
pub struct Authority {
    settings: AuthSettings,
    rules: RwLock<Arc<Rules>>,
    generation: AtomicU64,
    /// Keyed by the hash of the token, so that memory holds no token.
    remembered: Mutex<HashMap<[u8; 32], Arc<Identity>>>,
    /// Why the files cannot be used, as of the last check.
    problem: Mutex<Option<String>>,
    /// Held during a check, so that `problem` is the result of the last check.
    looking: Mutex<()>,
}

struct Rules {
    keys: Keys,
    policy: Policy,
    texts: (String, String),
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Authority {
    /// Reads the files, and checks them for changes as long as the result lives.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`] when a file cannot be read or used.
    pub fn open(settings: AuthSettings) -> Result<Arc<Self>, AuthorityError> {
        let rules = Rules::read(&settings)?;
        tracing::info!(
            jwks = %settings.jwks.display(),
            policy = %settings.policy.display(),
            issuer = settings.issuer,
            audience = settings.audience,
            keys = rules.keys.len(),
            "calls need a token"
        );
        let authority = Arc::new(Self {
            settings,
            rules: RwLock::new(Arc::new(rules)),
            generation: AtomicU64::new(0),
            remembered: Mutex::default(),
            problem: Mutex::default(),
            looking: Mutex::default(),
        });
        let watched = Arc::downgrade(&authority);
        let watch = std::thread::Builder::new().name("kvpool-auth".to_owned());
        let watch = watch.spawn(move || watch_files(&watched));
        if let Err(error) = watch {
            tracing::error!(%error, "no thread to watch the JWKS and the policy: restart after changes");
        }
        Ok(authority)
    }

    /// The number of the files' present contents. It rises with each change.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Why the JWKS or the policy cannot be used, as a sentence; `None` while both can be used.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// Verifies a token and finds its roles.
    ///
    /// # Errors
    ///
    /// [`TokenError`] says why the token is refused.
    pub fn judge(&self, token: &str) -> Result<Arc<Identity>, TokenError> {
        let hash = Sha256::digest(token.as_bytes()).into();
        let known = self.remembered.lock().get(&hash).map(Arc::clone);
        if let Some(known) = known {
            if known.has_expired() {
                self.remembered.lock().remove(&hash);
                return Err(TokenError::Expired);
            }
            return Ok(known);
        }
        let (rules, generation) = {
            let rules = self.rules.read();
            (Arc::clone(&rules), self.generation())
        };
        let AuthSettings {
            issuer, audience, ..
        } = &self.settings;
        let claims = claims::verify(token, &rules.keys, issuer, audience)?;
        let identity = Arc::new(rules.policy.identity(claims));
        let mut remembered = self.remembered.lock();
        // A judgement by files that have changed meanwhile is not cached.
        if generation == self.generation() {
            if remembered.len() >= MOST_REMEMBERED {
                remembered.clear();
            }
            remembered.insert(hash, Arc::clone(&identity));
        }
        Ok(identity)
    }

    /// Reads the files, and uses them if they changed. A file that cannot be used changes nothing. A JWKS without
    /// keys can be used: the operator has removed the last key, and every caller is refused.
    fn look(&self) -> Result<bool, AuthorityError> {
        let _one_at_a_time = self.looking.lock();
        let outcome = self.read_again();
        let problem = match &outcome {
            Err(error) => Some(format!(
                "the JWKS or the policy cannot be used, the one before stays: {error}"
            )),
            Ok(_) if self.rules.read().keys.len() == 0 => {
                let jwks = self.settings.jwks.display();
                Some(format!("every caller is refused: {jwks}: {NO_KEY}"))
            }
            Ok(_) => None,
        };
        *self.problem.lock() = problem;
        outcome
    }

    fn read_again(&self) -> Result<bool, AuthorityError> {
        let texts = Rules::texts(&self.settings)?;
        if texts == self.rules.read().texts {
            return Ok(false);
        }
        let fresh = Rules::parse(&self.settings, texts)?;
        if fresh.keys.len() == 0 {
            let jwks = self.settings.jwks.display();
            tracing::error!(%jwks, "{NO_KEY}: from now on every caller is refused; add a key to let callers in");
        }
        let mut rules = self.rules.write();
        *rules = Arc::new(fresh);
        let mut remembered = self.remembered.lock();
        self.generation.fetch_add(1, Ordering::AcqRel);
        remembered.clear();
        Ok(true)
    }
}

impl Rules {
    fn texts(settings: &AuthSettings) -> Result<(String, String), SecretFileError> {
        Ok((
            read_trusted(&settings.jwks)?,
            read_trusted(&settings.policy)?,
        ))
    }

    /// The rules at the start of a daemon. A start without keys fails, because such a daemon would
    /// refuse every caller.
    fn read(settings: &AuthSettings) -> Result<Self, AuthorityError> {
        let rules = Self::parse(settings, Self::texts(settings)?)?;
        if rules.keys.len() == 0 {
            return Err(AuthorityError::Keys {
                path: settings.jwks.clone(),
                problem: NO_KEY.to_owned(),
            });
        }
        Ok(rules)
    }

    fn parse(settings: &AuthSettings, texts: (String, String)) -> Result<Self, AuthorityError> {
        let keys = Keys::parse(&texts.0).map_err(|problem| AuthorityError::Keys {
            path: settings.jwks.clone(),
            problem,
        })?;
        let unusable = |source| AuthorityError::Policy {
            path: settings.policy.clone(),
            source,
        };
        let policy = Policy::parse(&texts.1).map_err(unusable)?;
        // Some editors empty a file before they write it. Such a file must not lock out all callers.
        if policy.is_empty() {
            return Err(unusable(PolicyError::NoRule));
        }
        Ok(Self {
            keys,
            policy,
            texts,
        })
    }
}

fn watch_files(watched: &Weak<Authority>) {
    let mut told = String::new();
    loop {
        std::thread::sleep(LOOK);
        let Some(authority) = watched.upgrade() else {
            return;
        };
        match authority.look() {
            Ok(false) => told.clear(),
            Ok(true) => {
                told.clear();
                tracing::info!("the JWKS or the policy changed, all callers are judged by it");
            }
            Err(error) => {
                let said = error.to_string();
                if said != told {
                    tracing::error!(%error, "the JWKS or the policy cannot be used: the earlier one stays");
                    told = said;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
