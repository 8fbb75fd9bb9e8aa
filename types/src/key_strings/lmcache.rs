//! `{model}@{world_size}@{worker_id}@{hash hex}@{dtype}[@{layer}][@{tag}%{value}]...`.

use super::{Fields, KeyStringError, bad, check_length, is_hex, name, number};
use crate::Key;

const FORM: &str = "LMCache";

/// A key of LMCache's cache engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LmcacheKey {
    /// The model's name.
    pub model: String,
    /// The number of workers that share the model.
    pub world_size: u32,
    /// The worker that made the chunk.
    pub worker_id: u32,
    /// The chunk's hash in lower-case hex digits: 16 of a 64-bit hash, 64 of a SHA-256.
    pub hash_hex: String,
    /// The element type.
    pub dtype: String,
    /// The layer; `None` when a chunk covers all layers.
    pub layer: Option<u32>,
    /// Tags and their values, in order.
    pub tags: Vec<(String, String)>,
}

impl LmcacheKey {
    /// Builds the string.
    ///
    /// # Errors
    ///
    /// [`KeyStringError::BadField`] for a field that the form cannot hold,
    /// [`KeyStringError::NoKey`] when the string is too long.
    pub fn build(&self) -> Result<String, KeyStringError> {
        let model = name(&self.model).ok_or_else(|| bad(FORM, "model", &self.model))?;
        let dtype = name(&self.dtype).ok_or_else(|| bad(FORM, "dtype", &self.dtype))?;
        if !is_hex(&self.hash_hex) {
            return Err(bad(FORM, "hash", &self.hash_hex));
        }
        let mut text = format!(
            "{model}@{}@{}@{}@{dtype}",
            self.world_size, self.worker_id, self.hash_hex
        );
        if let Some(layer) = self.layer {
            text += &format!("@{layer}");
        }
        for (tag, value) in &self.tags {
            let written = format!("{tag}%{value}");
            // Parsing splits at the first `%`, so a tag's name cannot contain one.
            if tag.is_empty() || tag.contains('%') || written.contains('@') {
                return Err(bad(FORM, "tag", &written));
            }
            text += &format!("@{written}");
        }
        check_length(FORM, text.len())?;
        Ok(text)
    }

    /// Parses the string.
    ///
    /// # Errors
    ///
    /// See [`KeyStringError`].
    pub fn parse(text: &str) -> Result<Self, KeyStringError> {
        let mut fields = Fields::new(FORM, text)?;
        let mut key = Self {
            model: fields.read("model", name)?,
            world_size: fields.read("world size", number)?,
            worker_id: fields.read("worker id", number)?,
            hash_hex: fields.read("hash", |hex| is_hex(hex).then(|| hex.to_owned()))?,
            dtype: fields.read("dtype", name)?,
            layer: None,
            tags: Vec::new(),
        };
        for (at, field) in fields.rest.enumerate() {
            match field.split_once('%') {
                Some((tag, value)) if !tag.is_empty() => {
                    key.tags.push((tag.to_owned(), value.to_owned()));
                }
                None if at == 0 => {
                    let layer = number(field).ok_or_else(|| bad(FORM, "layer", field))?;
                    key.layer = Some(layer);
                }
                _ => return Err(bad(FORM, "tag", field)),
            }
        }
        Ok(key)
    }

    /// The pool's key: a SHA-256 with prefix and suffix, or text for another hash.
    ///
    /// # Errors
    ///
    /// As [`LmcacheKey::build`].
    pub fn to_key(&self) -> Result<Key, KeyStringError> {
        let text = self.build()?;
        Key::parse(&text).map_err(|source| KeyStringError::NoKey { form: FORM, source })
    }
}
