//! `{model}@pcp{n}@dcp{n}@head_or_tp_rank:{n}@pp_rank:{n}@{hex sha256}[@{layer}]`.

use super::{Fields, KeyStringError, bad, check_length, name, number};
use crate::key::{Digest, Key, KeyRef};

const FORM: &str = "pool";

/// A key over a SHA-256, made by one rank of a model that is partitioned in several dimensions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PoolKey {
    /// The model's name.
    pub model: String,
    /// The rank in prefill context parallelism.
    pub pcp: u32,
    /// The rank in decode context parallelism.
    pub dcp: u32,
    /// The first KV head, or the rank in tensor parallelism.
    pub head_or_tp_rank: u32,
    /// The rank in pipeline parallelism. Layered keys may omit it, because a layer lies in one
    /// stage.
    pub pp_rank: Option<u32>,
    /// The block's hash.
    pub hash: Digest,
    /// The layer; `None` when a block covers all layers.
    pub layer: Option<u32>,
}

impl PoolKey {
    /// Builds the string.
    ///
    /// # Errors
    ///
    /// [`KeyStringError::Missing`] when both the pipeline rank and the layer are `None`.
    /// [`KeyStringError::BadField`] for a field that the form cannot hold,
    /// [`KeyStringError::NoKey`] when the string is too long.
    pub fn build(&self) -> Result<String, KeyStringError> {
        let model = name(&self.model).ok_or_else(|| bad(FORM, "model", &self.model))?;
        let mut text = format!(
            "{model}@pcp{}@dcp{}@head_or_tp_rank:{}",
            self.pcp, self.dcp, self.head_or_tp_rank
        );
        match (self.pp_rank, self.layer) {
            (Some(rank), _) => text += &format!("@pp_rank:{rank}"),
            (None, Some(_)) => {}
            (None, None) => return Err(missing_pp_rank()),
        }
        text += &format!("@{}", Key::from_digest(self.hash));
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
        let model = fields.read("model", name)?;
        let pcp = fields.read("pcp", labelled("pcp"))?;
        let dcp = fields.read("dcp", labelled("dcp"))?;
        let head_or_tp_rank = fields.read("head_or_tp_rank", labelled("head_or_tp_rank:"))?;
        let next = fields.next("pp_rank")?;
        let (pp_rank, hash) = match sha256(next) {
            Some(hash) => (None, hash),
            None => {
                let rank = labelled("pp_rank:")(next).ok_or_else(|| bad(FORM, "pp_rank", next))?;
                (Some(rank), fields.read("hash", sha256)?)
            }
        };
        let layer = fields.layer()?;
        fields.finish()?;
        if pp_rank.is_none() && layer.is_none() {
            return Err(missing_pp_rank());
        }
        Ok(Self {
            model,
            pcp,
            dcp,
            head_or_tp_rank,
            pp_rank,
            hash,
            layer,
        })
    }

    /// The pool's key: the digest with prefix and suffix.
    ///
    /// # Errors
    ///
    /// As [`PoolKey::build`].
    pub fn to_key(&self) -> Result<Key, KeyStringError> {
        let text = self.build()?;
        Key::parse(&text).map_err(|source| KeyStringError::NoKey { form: FORM, source })
    }
}

const fn missing_pp_rank() -> KeyStringError {
    KeyStringError::Missing {
        form: FORM,
        field: "pp_rank",
    }
}

fn labelled(label: &'static str) -> impl Fn(&str) -> Option<u32> {
    move |text| number(text.strip_prefix(label)?)
}

fn sha256(text: &str) -> Option<Digest> {
    match Key::parse(text).ok()?.as_ref() {
        KeyRef::Digest {
            prefix: "",
            suffix: "",
            digest,
        } => Some(*digest),
        _ => None,
    }
}
