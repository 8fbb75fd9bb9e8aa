//! The slot of metadata that follows the last chunk of pages (rows S3, S5).
//!
//! A slot holds one request's first token and the metadata of that token. Each field begins at a multiple of 64
//! bytes and has at least 64 bytes, so that a device moves no smaller piece. The room is in little-endian
//! order. The session copies the other fields unchanged.

use crate::room::RoomId;
use std::ops::Range;

/// The alignment and the least size of a field, in bytes.
const LINE: u64 = 64;

/// A field of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuxField {
    /// 16 i32: the tokens that prefill has sampled.
    OutputIds,
    /// 16 i32. The first is the number of tokens that prefill had cached.
    CachedTokens,
    /// 16 f32: the log probabilities of the sampled tokens.
    TokenLogprobValues,
    /// 16 i32: the tokens of [`Self::TokenLogprobValues`].
    TokenLogprobIndices,
    /// 128 f32: the greatest log probabilities.
    TopLogprobValues,
    /// 128 i32: the tokens of [`Self::TopLogprobValues`].
    TopLogprobIndices,
    /// 16 f32: the probabilities for speculative decoding.
    TopkP,
    /// 16 i64: the tokens of [`Self::TopkP`].
    TopkIndices,
    /// The hidden states of the last token. Their length is the model's hidden size times the size of its
    /// dtype.
    HiddenStates,
    /// 8 u64. The first is the room, which the receiver compares with its own.
    Room,
}

impl AuxField {
    /// All fields, in their order in a slot.
    pub const ALL: [Self; 10] = [
        Self::OutputIds,
        Self::CachedTokens,
        Self::TokenLogprobValues,
        Self::TokenLogprobIndices,
        Self::TopLogprobValues,
        Self::TopLogprobIndices,
        Self::TopkP,
        Self::TopkIndices,
        Self::HiddenStates,
        Self::Room,
    ];

    /// The field's name in the documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutputIds => "output_ids",
            Self::CachedTokens => "cached_tokens",
            Self::TokenLogprobValues => "token_logprobs_val",
            Self::TokenLogprobIndices => "token_logprobs_idx",
            Self::TopLogprobValues => "top_logprobs_val",
            Self::TopLogprobIndices => "top_logprobs_idx",
            Self::TopkP => "topk_p",
            Self::TopkIndices => "topk_index",
            Self::HiddenStates => "hidden_states",
            Self::Room => "room",
        }
    }
}

/// The byte range of each field in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxLayout {
    hidden_bytes: u32,
}

impl AuxLayout {
    /// A layout for hidden states of `hidden_bytes` bytes; 0 when prefill sends none.
    pub const fn new(hidden_bytes: u32) -> Self {
        Self { hidden_bytes }
    }

    /// The length of a field in bytes, without the padding that follows the field.
    pub fn bytes(&self, field: AuxField) -> u64 {
        match field {
            AuxField::OutputIds
            | AuxField::CachedTokens
            | AuxField::TokenLogprobValues
            | AuxField::TokenLogprobIndices
            | AuxField::TopkP => 16 * 4,
            AuxField::TopLogprobValues | AuxField::TopLogprobIndices => 128 * 4,
            AuxField::TopkIndices => 16 * 8,
            AuxField::HiddenStates => u64::from(self.hidden_bytes).max(LINE),
            AuxField::Room => 8 * 8,
        }
    }

    /// The byte range of a field in a slot.
    pub fn range(&self, field: AuxField) -> Range<u64> {
        let mut begin = 0;
        for each in AuxField::ALL {
            if each == field {
                break;
            }
            begin += self.bytes(each).next_multiple_of(LINE);
        }
        begin..begin + self.bytes(field)
    }

    /// The length of a slot in bytes.
    pub fn slot_bytes(&self) -> u64 {
        self.range(AuxField::Room).end
    }

    /// The bytes of a field in a slot; `None` when the slot is too short.
    pub fn field<'a>(&self, slot: &'a [u8], field: AuxField) -> Option<&'a [u8]> {
        let Range { start, end } = self.range(field);
        slot.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }

    /// Writes `bytes` at the start of a field. Returns false, and changes nothing, when the bytes exceed the
    /// slot.
    pub fn put(&self, slot: &mut [u8], field: AuxField, bytes: &[u8]) -> bool {
        let Range { start, end } = self.range(field);
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        let place = range.and_then(|(start, end)| slot.get_mut(start..end));
        let place = place.and_then(|place| place.get_mut(..bytes.len()));
        place.is_some_and(|place| {
            place.copy_from_slice(bytes);
            true
        })
    }

    /// The room that a slot names; `None` when the slot is too short.
    pub fn room(&self, slot: &[u8]) -> Option<RoomId> {
        let field = self.field(slot, AuxField::Room)?;
        let room = field.first_chunk::<8>()?;
        Some(RoomId(u64::from_le_bytes(*room)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s5_fields_have_the_documented_sizes_and_do_not_overlap() {
        for hidden in [0, 1, 64, 4096 * 2, 7168 * 2] {
            let layout = AuxLayout::new(hidden);
            let mut end = 0;
            for field in AuxField::ALL {
                let range = layout.range(field);
                assert!(
                    range.start >= end && range.start.is_multiple_of(64),
                    "{field:?}"
                );
                assert!(range.end - range.start >= 64, "{field:?}");
                end = range.end;
            }
            assert_eq!(layout.slot_bytes(), end);
            let sizes = AuxField::ALL.map(|field| layout.bytes(field));
            let hidden = u64::from(hidden).max(64);
            assert_eq!(sizes, [64, 64, 64, 64, 512, 512, 64, 128, hidden, 64]);
        }
    }

    #[test]
    fn s3_a_slot_names_its_room() {
        let layout = AuxLayout::new(100);
        let mut slot = vec![0xff; usize::try_from(layout.slot_bytes()).unwrap()];
        assert!(layout.put(&mut slot, AuxField::Room, &4711u64.to_le_bytes()));
        assert!(layout.put(&mut slot, AuxField::OutputIds, &17i32.to_le_bytes()));
        assert_eq!(layout.room(&slot), Some(RoomId(4711)));
        assert_eq!(
            layout.field(&slot, AuxField::OutputIds).unwrap()[..4],
            [17, 0, 0, 0]
        );
        assert_eq!(layout.room(&slot[..100]), None);
        assert!(!layout.put(&mut slot, AuxField::Room, &[0; 65]));
    }
}
