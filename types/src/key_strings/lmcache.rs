//! `{model}@{world_size}@{worker_id}@{hash hex}@{dtype}[@{layer}][@{tag}%{value}]...`.

use super::{Fields, KeyStringError, bad, check_length, is_hex, name, number};
use crate::Key;

const FORM: &str = "LMCache";

/// A key of LMCache's cache engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LmcacheKey {
    /// The model.
    pub model: String,
    /// How many workers share the model.
    pub world_size: u32,
    /// Which of them made the chunk.
    pub worker_id: u32,
    /// The chunk's hash in lower-case hex digits: 16 of a 64-bit hash, 64 of a SHA-256.
    pub hash_hex: String,
    /// The element type.
    pub dtype: String,
    /// The layer, where each has a chunk of its own.
    pub layer: Option<u32>,
    /// Tags and their values, in the order in which they are written.
    pub tags: Vec<(String, String)>,
}

impl LmcacheKey {
    /// The key's string.
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
            // What is read is cut at the first `%`, so a tag's name cannot hold one.
            if tag.is_empty() || tag.contains('%') || written.contains('@') {
                return Err(bad(FORM, "tag", &written));
            }
            text += &format!("@{written}");
        }
        check_length(FORM, text.len())?;
        Ok(text)
    }

    /// The fields of a key's string.
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

    /// The pool's key: a SHA-256 between what stands before and after it, or text for another hash.
    pub fn to_key(&self) -> Result<Key, KeyStringError> {
        let text = self.build()?;
        Key::parse(&text).map_err(|source| KeyStringError::NoKey { form: FORM, source })
    }
}
