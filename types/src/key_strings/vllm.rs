//! `vllm@{model}@{world_size}@{worker_id}@{hash:016x}[@{layer}]`.

use super::{Fields, KeyStringError, bad, check_length, is_hex, name, number};
use crate::Key;

const FORM: &str = "vllm";

/// A key over a 64-bit chain hash ([`crate::hash64`]), made by a worker of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VllmKey {
    /// The model's name. A `/` is written as `_`, so [`VllmKey::parse`] does not restore it.
    pub model: String,
    /// The number of workers that share the model.
    pub world_size: u32,
    /// The worker that made the block.
    pub worker_id: u32,
    /// The block's hash.
    pub hash: u64,
    /// The layer; `None` when a block covers all layers.
    pub layer: Option<u32>,
}

impl VllmKey {
    /// Builds the string.
    ///
    /// # Errors
    ///
    /// [`KeyStringError::BadField`] for a field that the form cannot hold,
    /// [`KeyStringError::NoKey`] when the string is too long.
    pub fn build(&self) -> Result<String, KeyStringError> {
        let model = name(&self.model)
            .ok_or_else(|| bad(FORM, "model", &self.model))?
            .replace('/', "_");
        let mut text = format!(
            "vllm@{model}@{}@{}@{:016x}",
            self.world_size, self.worker_id, self.hash
        );
        if let Some(layer) = self.layer {
            text += &format!("@{layer}");
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
        fields.read("engine", |engine| (engine == "vllm").then_some(()))?;
        let key = Self {
            model: fields.read("model", |model| {
                name(model).filter(|model| !model.contains('/'))
            })?,
            world_size: fields.read("world size", number)?,
            worker_id: fields.read("worker id", number)?,
            hash: fields.read("hash", hash)?,
            layer: fields.layer()?,
        };
        fields.finish()?;
        Ok(key)
    }

    /// The pool's key.
    ///
    /// # Errors
    ///
    /// As [`VllmKey::build`].
    pub fn to_key(&self) -> Result<Key, KeyStringError> {
        let text = self.build()?;
        Key::parse(&text).map_err(|source| KeyStringError::NoKey { form: FORM, source })
    }
}

fn hash(text: &str) -> Option<u64> {
    (text.len() == 16 && is_hex(text))
        .then(|| u64::from_str_radix(text, 16).ok())
        .flatten()
}
