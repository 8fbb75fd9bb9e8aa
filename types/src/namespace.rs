//! Namespaces separate the blocks of different models, layouts and tenants.

use crate::key::Digest;
use sha2::{Digest as _, Sha256};

/// The name that the empty name stands for.
pub const DEFAULT_NAME: &str = "default";
/// The longest name, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// The longest value of each other field, in bytes.
pub const MAX_FIELD_BYTES: usize = 1024;

/// A namespace: its name, known to callers and tenants, and the fields that seed its chains.
///
/// Two namespaces with the same other fields have the same chain digests. Their blocks are still
/// separate, because a block is found by its namespace and its key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// 1 to [`MAX_NAME_BYTES`] characters of `A-Z a-z 0-9 . _ / : @ -`; empty for [`DEFAULT_NAME`].
    pub name: String,
    /// The model whose KV the namespace holds.
    pub model: String,
    /// The element type of the KV.
    pub dtype: String,
    /// The part of the model's KV that it holds, when several workers share a model.
    pub parallel_rank: String,
    /// Any further text that separates chains. It is not secret: listing namespaces shows it.
    pub salt: String,
}

/// Why a namespace is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// The name exceeds [`MAX_NAME_BYTES`].
    #[error("a namespace's name has at most {MAX_NAME_BYTES} bytes, this one has {0}")]
    NameTooLong(usize),
    /// The name contains a character that is not allowed.
    #[error("a namespace's name has only letters, digits and . _ / : @ -, not {0:?}")]
    BadNameCharacter(char),
    /// Another field exceeds [`MAX_FIELD_BYTES`].
    #[error("a namespace's {field} has at most {MAX_FIELD_BYTES} bytes, this one has {bytes}")]
    FieldTooLong {
        /// The field.
        field: &'static str,
        /// Its length in bytes.
        bytes: usize,
    },
}

impl Namespace {
    /// The name, or [`DEFAULT_NAME`] when it is empty.
    pub fn name_or_default(&self) -> &str {
        if self.name.is_empty() {
            DEFAULT_NAME
        } else {
            &self.name
        }
    }

    /// Checks every field against its limits.
    ///
    /// # Errors
    ///
    /// See [`NamespaceError`].
    pub fn validate(&self) -> Result<(), NamespaceError> {
        if self.name.len() > MAX_NAME_BYTES {
            return Err(NamespaceError::NameTooLong(self.name.len()));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._/:@-".contains(c);
        if let Some(bad) = self.name.chars().find(|c| !allowed(*c)) {
            return Err(NamespaceError::BadNameCharacter(bad));
        }
        for (field, text) in ["model", "dtype", "parallel rank", "salt"]
            .into_iter()
            .zip(self.seeding())
        {
            if text.len() > MAX_FIELD_BYTES {
                return Err(NamespaceError::FieldTooLong {
                    field,
                    bytes: text.len(),
                });
            }
        }
        Ok(())
    }

    /// The seed of the namespace's chains: the SHA-256 of model, dtype, parallel rank and salt.
    /// Each follows its length in bytes (32 bits, little-endian), so that no two divisions of the
    /// same text are equal. The fields of a valid namespace are far below what 32 bits can hold.
    pub fn seed(&self) -> Digest {
        let mut hasher = Sha256::new();
        for field in self.seeding() {
            let length = u32::try_from(field.len()).unwrap_or(u32::MAX);
            hasher.update(length.to_le_bytes());
            hasher.update(field);
        }
        hasher.finalize().into()
    }

    fn seeding(&self) -> [&str; 4] {
        [&self.model, &self.dtype, &self.parallel_rank, &self.salt]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    fn namespace(model: &str, dtype: &str, rank: &str, salt: &str) -> Namespace {
        Namespace {
            name: "tests".into(),
            model: model.into(),
            dtype: dtype.into(),
            parallel_rank: rank.into(),
            salt: salt.into(),
        }
    }

    /// Python 3:
    /// ```python
    /// def lp(s): b = s.encode(); return struct.pack('<I', len(b)) + b
    /// def seed(*fields): return hashlib.sha256(b''.join(map(lp, fields))).hexdigest()
    /// ```
    #[test]
    fn seeds_match_hashlib() {
        for (fields, expected) in [
            // seed('', '', '', '')
            (
                ["", "", "", ""],
                "374708fff7719dd5979ec875d56cd2286f6d3cf7ec317a3b25632aab28ec37bb",
            ),
            // seed('llama-3-8b', 'bf16', '0/2', 'pepper')
            (
                ["llama-3-8b", "bf16", "0/2", "pepper"],
                "36763eb44ccebb0ac3d657e78655028251e51b4faf9b36079091d040d6348d7e",
            ),
            // seed('llama-3-8bb', 'f16', '0/2', 'pepper'): the same text, divided elsewhere.
            (
                ["llama-3-8bb", "f16", "0/2", "pepper"],
                "224ccf0c681a4b7b29066aa1147a7467a99e274b3caec8e6120447813895da51",
            ),
            // seed('模型', 'fp8', '', ''): lengths count bytes.
            (
                ["模型", "fp8", "", ""],
                "a706d7e0b3547a96853d7a6592024ce6cb15c5ae475ba93b620c11ed8c8babf9",
            ),
        ] {
            let [model, dtype, rank, salt] = fields;
            let seed = namespace(model, dtype, rank, salt).seed();
            assert_eq!(Key::from_digest(seed).to_string(), expected);
        }
    }

    #[test]
    fn limits_are_enforced_at_their_edges() {
        let field = "x".repeat(MAX_FIELD_BYTES);
        let mut good = namespace(&field, &field, &field, &field);
        good.name = "aZ09._/:@-".repeat(25) + "abcde";
        assert_eq!(good.name.len(), MAX_NAME_BYTES);
        good.validate().unwrap();
        Namespace::default().validate().unwrap();

        let mut long = good.clone();
        long.name.push('x');
        assert_eq!(long.validate(), Err(NamespaceError::NameTooLong(256)));
        for bad in ['é', ' ', '\0', '%'] {
            let mut named = good.clone();
            named.name = format!("a{bad}");
            assert_eq!(named.validate(), Err(NamespaceError::BadNameCharacter(bad)));
        }
        let fields: [fn(&mut Namespace) -> &mut String; 4] = [
            |n| &mut n.model,
            |n| &mut n.dtype,
            |n| &mut n.parallel_rank,
            |n| &mut n.salt,
        ];
        for field in fields {
            let mut long = good.clone();
            field(&mut long).push('x');
            assert!(matches!(
                long.validate(),
                Err(NamespaceError::FieldTooLong { bytes: 1025, .. })
            ));
        }
    }

    #[test]
    fn the_empty_name_is_the_default_one() {
        assert_eq!(Namespace::default().name_or_default(), DEFAULT_NAME);
        assert_eq!(namespace("", "", "", "").name_or_default(), "tests");
    }
}
