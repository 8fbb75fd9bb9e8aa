//! Keys and tokens for pools without an issuer: `kvctl token create`.

use crate::backend::{self, ED25519_BYTES};
use crate::secret_file::{self, SecretFileError};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fmt;
use std::path::Path;

/// Why a key or a token cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IssueError {
    /// A file cannot be read or written, or others can read it.
    #[error(transparent)]
    File(#[from] SecretFileError),
    /// The file holds no key of `kvctl token create`.
    #[error("{0} holds no signing key of `kvctl token create`")]
    NotAKey(String),
    /// The system gave no random bytes, or refused to sign.
    #[error("the key cannot be used: {0}")]
    Failed(String),
}

/// A private key that signs tokens with EdDSA.
pub struct SigningKey {
    seed: [u8; ED25519_BYTES],
    public: [u8; ED25519_BYTES],
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.id())
    }
}

/// A private key as a JWK (RFC 8037).
#[derive(Serialize, Deserialize)]
struct PrivateJwk {
    kty: String,
    crv: String,
    d: String,
    x: String,
}

/// The claims of a new token.
#[derive(Clone, Debug)]
pub struct NewToken<'a> {
    /// The subject.
    pub subject: &'a str,
    /// The issuer.
    pub issuer: &'a str,
    /// The audience: pools with this audience accept the token.
    pub audience: &'a str,
    /// When it begins, in seconds since 1970.
    pub begins: u64,
    /// When it ends, in seconds since 1970.
    pub expires: u64,
}

impl SigningKey {
    /// A new random key.
    ///
    /// # Errors
    ///
    /// [`IssueError::Failed`] when the system gives no random bytes.
    pub fn generate() -> Result<Self, IssueError> {
        let mut seed = [0; ED25519_BYTES];
        let filled = SystemRandom::new().fill(&mut seed);
        filled.map_err(|_| IssueError::Failed("no random bytes".to_owned()))?;
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed)
            .map_err(|error| IssueError::Failed(error.to_string()))?;
        let public = pair.public_key().as_ref().try_into();
        let public = public.map_err(|_| IssueError::Failed("its public key is odd".to_owned()))?;
        Ok(Self { seed, public })
    }

    /// Reads a key from its file. A file that others can read is refused.
    ///
    /// # Errors
    ///
    /// [`IssueError`] when the file cannot be read, or holds no key.
    pub fn load(path: &Path) -> Result<Self, IssueError> {
        let text = secret_file::read_secret(path)?;
        let jwk: Option<PrivateJwk> = serde_json::from_str(&text).ok();
        let key = jwk.filter(|jwk| jwk.kty == "OKP" && jwk.crv == "Ed25519");
        let key = key.and_then(|jwk| {
            let bytes = |text| URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok();
            Some(Self {
                seed: bytes(jwk.d)?,
                public: bytes(jwk.x)?,
            })
        });
        let matching = key
            .filter(|key| Ed25519KeyPair::from_seed_and_public_key(&key.seed, &key.public).is_ok());
        matching.ok_or_else(|| IssueError::NotAKey(path.display().to_string()))
    }

    /// Writes the key to a file that only its owner can read.
    ///
    /// # Errors
    ///
    /// [`IssueError::File`] when the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), IssueError> {
        let jwk = PrivateJwk {
            kty: "OKP".to_owned(),
            crv: "Ed25519".to_owned(),
            d: URL_SAFE_NO_PAD.encode(self.seed),
            x: URL_SAFE_NO_PAD.encode(self.public),
        };
        let text = serde_json::to_string_pretty(&jwk)
            .map_err(|error| IssueError::Failed(error.to_string()))?;
        Ok(secret_file::write(path, &(text + "\n"), 0o600)?)
    }

    /// The key's id: a part of the hash of its public half.
    pub fn id(&self) -> String {
        let hash = Sha256::digest(self.public);
        URL_SAFE_NO_PAD.encode(hash.get(..12).unwrap_or_default())
    }

    /// The public half, as a member of a JWKS.
    pub fn public_jwk(&self) -> Value {
        json!({
            "kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig",
            "kid": self.id(), "x": URL_SAFE_NO_PAD.encode(self.public),
        })
    }

    /// Signs a token.
    ///
    /// # Errors
    ///
    /// [`IssueError::Failed`] when the key cannot sign.
    pub fn sign(&self, token: &NewToken<'_>) -> Result<String, IssueError> {
        self.sign_claims(&json!({
            "sub": token.subject, "iss": token.issuer, "aud": token.audience,
            "iat": token.begins, "nbf": token.begins, "exp": token.expires,
        }))
    }

    /// Signs any claims.
    ///
    /// # Errors
    ///
    /// [`IssueError::Failed`] when the key cannot sign.
    pub fn sign_claims(&self, claims: &Value) -> Result<String, IssueError> {
        backend::install();
        let header = Header {
            kid: Some(self.id()),
            ..Header::new(Algorithm::EdDSA)
        };
        let key = EncodingKey::from_ed_der(&[self.seed, self.public].concat());
        jsonwebtoken::encode(&header, claims, &key)
            .map_err(|error| IssueError::Failed(error.to_string()))
    }
}

/// Adds the public half of `key` to the JWKS file at `path`, which need not exist.
///
/// # Errors
///
/// [`IssueError`] when the file is not a JWKS, or cannot be written.
pub fn publish(key: &SigningKey, path: &Path) -> Result<(), IssueError> {
    let mut set = match read_set(path) {
        Err(IssueError::File(SecretFileError::Io { source, .. }))
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            json!({ "keys": [] })
        }
        read => read?,
    };
    let id = Value::from(key.id());
    let keys = keys_of(&mut set, path)?;
    if !keys.iter().any(|known| known.get("kid") == Some(&id)) {
        keys.push(key.public_jwk());
    }
    write_set(&set, path)
}

/// Removes the key with this id from the JWKS file at `path`.
///
/// # Errors
///
/// [`IssueError`] when the file is not a JWKS, or cannot be written.
pub fn withdraw(id: &str, path: &Path) -> Result<(), IssueError> {
    let mut set = read_set(path)?;
    let keys = keys_of(&mut set, path)?;
    keys.retain(|known| known.get("kid").and_then(Value::as_str) != Some(id));
    write_set(&set, path)
}

/// The ids of the keys in the JWKS file at `path`.
///
/// # Errors
///
/// [`IssueError`] when the file is not a JWKS.
pub fn key_ids(path: &Path) -> Result<Vec<String>, IssueError> {
    let mut set = read_set(path)?;
    let keys = keys_of(&mut set, path)?.iter();
    let ids = keys.filter_map(|known| known.get("kid")?.as_str());
    Ok(ids.map(str::to_owned).collect())
}

fn read_set(path: &Path) -> Result<Value, IssueError> {
    let (text, _) = secret_file::read(path)?;
    serde_json::from_str(&text)
        .map_err(|error| IssueError::Failed(format!("{} is no JWKS: {error}", path.display())))
}

fn keys_of<'s>(set: &'s mut Value, path: &Path) -> Result<&'s mut Vec<Value>, IssueError> {
    let keys = set.get_mut("keys").and_then(Value::as_array_mut);
    keys.ok_or_else(|| IssueError::Failed(format!("{} is no JWKS", path.display())))
}

fn write_set(set: &Value, path: &Path) -> Result<(), IssueError> {
    let text =
        serde_json::to_string_pretty(set).map_err(|error| IssueError::Failed(error.to_string()))?;
    Ok(secret_file::write(path, &(text + "\n"), 0o644)?)
}

/// Writes a token, or another secret, to a file that only its owner can read.
///
/// # Errors
///
/// [`IssueError::File`] when the file cannot be written.
pub fn save_secret(path: &Path, text: &str) -> Result<(), IssueError> {
    Ok(secret_file::write(path, text, 0o600)?)
}

/// Appends text to a file that everybody may read. Creates the file if it does not exist.
///
/// # Errors
///
/// [`IssueError::File`] when the file cannot be read or written.
pub fn append_public(path: &Path, text: &str) -> Result<(), IssueError> {
    let before = match secret_file::read(path) {
        Ok((before, _)) => before,
        Err(SecretFileError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            String::new()
        }
        Err(error) => return Err(error.into()),
    };
    Ok(secret_file::write(path, &(before + text), 0o644)?)
}
