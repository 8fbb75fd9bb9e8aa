//! Certificates and tokens for the pools of a test binary.

use crate::trust;
use anyhow::Context;
use kvpool_auth::issue::{NewToken, SigningKey, publish, save_secret};
use kvpool_auth::now;
use kvpool_tls::testing::{Authority, Life, Pair};
use parking_lot::Mutex;
use serde_json::json;
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use tempfile::TempDir;

/// The certificates of one test binary. Every client and request of this process trusts them.
#[derive(Debug)]
pub struct World {
    /// The directory of the files.
    pub directory: TempDir,
    /// The authority that signs them.
    pub authority: Authority,
    /// The daemons' certificate and key.
    pub daemon: Pair,
    /// A client's certificate and key.
    pub client: Pair,
}

impl World {
    fn new() -> Self {
        let directory = TempDir::with_prefix("kvpool-tls-").expect("a directory");
        let authority = Authority::new(directory.path(), "authority");
        let daemon = authority.sign("daemon", Life::Valid);
        let client = authority.sign("client", Life::Valid);
        trust::trust(authority.client(Some(&client)));
        Self {
            directory,
            authority,
            daemon,
            client,
        }
    }
}

/// The certificates of this process. They last until every thread that has called this function has ended, so call it
/// on the thread of the test.
pub fn world() -> Arc<World> {
    static WORLD: Mutex<Weak<World>> = Mutex::new(Weak::new());
    thread_local! {
        // A static of the process is never dropped, and would leave the directory behind.
        static HELD: OnceCell<Arc<World>> = const { OnceCell::new() };
    }
    let shared = || {
        let mut known = WORLD.lock();
        let world = known.upgrade().unwrap_or_else(|| Arc::new(World::new()));
        *known = Arc::downgrade(&world);
        world
    };
    HELD.with(|held| Arc::clone(held.get_or_init(shared)))
}

/// The flags of a daemon with `pair`, followed by `more`.
pub fn flags(pair: &Pair, more: &[&str]) -> Vec<String> {
    let path = |path: &Path| path.display().to_string();
    let mut flags = vec![
        "--tls-cert".to_owned(),
        path(&pair.cert),
        "--tls-key".to_owned(),
        path(&pair.key),
        "--tls-ca".to_owned(),
        path(&world().authority.ca),
    ];
    flags.extend(more.iter().map(|&flag| flag.to_owned()));
    flags
}

/// The claim `iss` of all tokens.
pub const ISSUER: &str = "https://issuer.example";

/// The rules of [`Tokens`]: a subject of each role in the namespace `default`, a subject of another
/// namespace, a subject without a rule (`stranger`), and `root`.
pub const POLICY: &str = r#"
[[rule]]
subject = "reader"
roles = ["reader"]
namespaces = ["default"]
[[rule]]
subject = "writer"
roles = ["writer"]
namespaces = ["default"]
[[rule]]
subject = "admin"
roles = ["admin"]
namespaces = ["default"]
[[rule]]
subject = "other"
roles = ["writer"]
namespaces = ["elsewhere"]
[[rule]]
subject = "root"
roles = ["admin"]
namespaces = ["*"]
[[rule]]
subject = "node"
roles = ["node"]
[[rule]]
subject = "operator"
roles = ["operator"]
"#;

/// An issuer of tokens. The daemons of a test read its JWKS and its policy.
#[derive(Debug)]
pub struct Tokens {
    directory: TempDir,
    key: Mutex<SigningKey>,
}

impl Tokens {
    /// Makes a new key, its JWKS, [`POLICY`], and tokens of `root` and `node` for an hour. Every
    /// later request and client of this process presents the token of `root`.
    pub fn new() -> anyhow::Result<Self> {
        let tokens = Self {
            directory: TempDir::with_prefix("kvpool-auth-")?,
            key: Mutex::new(SigningKey::generate()?),
        };
        publish(&tokens.key.lock(), &tokens.jwks())?;
        std::fs::write(tokens.path("policy.toml"), POLICY)?;
        for subject in ["root", "node"] {
            tokens.write(subject, 3600)?;
        }
        trust::show(tokens.file("root"));
        Ok(tokens)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The file with the public keys.
    pub fn jwks(&self) -> PathBuf {
        self.path("jwks.json")
    }

    /// The file with the token of `subject`.
    pub fn file(&self, subject: &str) -> PathBuf {
        self.path(&format!("{subject}.token"))
    }

    /// A token of `subject` that expires in `seconds`.
    pub fn token(&self, subject: &str, seconds: i64) -> anyhow::Result<String> {
        Ok(self.key.lock().sign(&NewToken {
            subject,
            issuer: ISSUER,
            audience: "kvpool",
            begins: now() - 60,
            expires: now().saturating_add_signed(seconds),
        })?)
    }

    /// A token of `root` for an hour, with the claims `over` changed, and signed by another key if
    /// `foreign`.
    pub fn token_with(&self, over: &serde_json::Value, foreign: bool) -> anyhow::Result<String> {
        let mut claims =
            json!({ "sub": "root", "iss": ISSUER, "aud": "kvpool", "exp": now() + 3600 });
        let fields = claims.as_object_mut().context("an object")?;
        fields.extend(over.as_object().cloned().unwrap_or_default());
        if foreign {
            return Ok(SigningKey::generate()?.sign_claims(&claims)?);
        }
        Ok(self.key.lock().sign_claims(&claims)?)
    }

    /// Writes a token of `subject` that expires in `seconds` to its file, in one step.
    pub fn write(&self, subject: &str, seconds: i64) -> anyhow::Result<()> {
        let token = self.token(subject, seconds)?;
        Ok(save_secret(&self.file(subject), &token)?)
    }

    /// Signs with a new key from now on, and adds its public half to the JWKS.
    pub fn add_key(&self) -> anyhow::Result<()> {
        let key = SigningKey::generate()?;
        publish(&key, &self.jwks())?;
        *self.key.lock() = key;
        Ok(())
    }

    /// Removes every key except the present one from the JWKS.
    pub fn retire_keys(&self) -> anyhow::Result<()> {
        let fresh = self.path("fresh.json");
        publish(&self.key.lock(), &fresh)?;
        Ok(std::fs::rename(fresh, self.jwks())?)
    }

    /// The flags of a daemon that requires tokens.
    pub fn flags(&self) -> Vec<String> {
        let path = |path: PathBuf| path.display().to_string();
        [
            "--auth-jwks".to_owned(),
            path(self.jwks()),
            "--auth-issuer".to_owned(),
            ISSUER.to_owned(),
            "--auth-policy".to_owned(),
            path(self.path("policy.toml")),
        ]
        .into()
    }

    /// The flags of a store node that requires tokens and presents its own.
    pub fn node_flags(&self) -> Vec<String> {
        let mut flags = self.flags();
        let own = self.file("node").display().to_string();
        flags.extend(["--token-file".to_owned(), own]);
        flags
    }
}
