//! Messages survive encoding, and the decoder accepts or refuses any bytes without a panic.

use super::*;
use crate::plan::{PageLayout, Stages, StateRule, StateShape};
use crate::registration::StateRegion;
use crate::room::{
    ChunkBody, PageRectangle, RoomChunk, RoomGeneration, RoomId, RoomKey, RoomOffer, RoomRoot,
    RoomTag,
};
use kvpool_types::{Checksum, Code};
use proptest::prelude::*;
use std::time::Duration;

const TAG: RoomTag = RoomTag {
    room: RoomId(u64::MAX - 1),
    generation: RoomGeneration(7),
};

fn description() -> RankDescription {
    let shapes = [
        StateShape::of_heads(PageLayout::HeadMajor, 64, 8, 128).unwrap(),
        StateShape::whole(StateRule::OneSource, 1152).unwrap(),
        StateShape::whole(StateRule::Copy, 4096).unwrap(),
    ];
    let state = |(layer, shape)| StateRegion {
        name: format!("state {layer}"),
        layer,
        shape,
        base: 0x7f00_0000_0000,
        pages: 1000,
    };
    RankDescription {
        address: "10.0.0.1:8998".to_owned(),
        tensor: (1, 4),
        pipeline: (1, Stages::new(&[3, 2]).unwrap()),
        page_tokens: 64,
        hidden_bytes: 8192,
        states: (0..).zip(shapes).map(state).collect(),
    }
}

fn messages() -> Vec<HandoffMessage> {
    let offer = RoomOffer {
        tag: TAG,
        receiver: 2,
        epoch: 9,
        key: RoomKey([3; 32]),
        held: 1,
        pages: 3,
        view: 5,
        wants_aux: true,
        time_left: Duration::from_millis(1234),
    };
    let chunk = |body| RoomChunk {
        id: 4,
        body,
        checksum: Checksum(0x1234_5678_9abc_def0),
    };
    let rectangle = PageRectangle {
        pages: 1..4,
        layers: 0..2,
    };
    let code = Code::Draining;
    let of_sender = [
        ToReceiver::Accept { tag: TAG },
        ToReceiver::Refuse { tag: TAG, code },
        ToReceiver::Busy {
            tag: TAG,
            retry_after: Duration::from_secs(2),
        },
        ToReceiver::Chunk {
            tag: TAG,
            chunk: chunk(ChunkBody::Pages(rectangle)),
        },
        ToReceiver::Chunk {
            tag: TAG,
            chunk: chunk(ChunkBody::Aux),
        },
        ToReceiver::Done {
            tag: TAG,
            chunks: 3,
            root: RoomRoot([9; 32]),
        },
        ToReceiver::Abort { tag: TAG, code },
        ToReceiver::Aborted { tag: TAG },
    ];
    let of_receiver = [
        ToSender::Offer(offer),
        ToSender::Complete { tag: TAG },
        ToSender::Lacks {
            tag: TAG,
            chunks: vec![1, 3],
        },
        ToSender::Abort { tag: TAG, code },
        ToSender::Aborted { tag: TAG },
        ToSender::Decline { tag: TAG, code },
    ];
    let mut all = vec![HandoffMessage::Register(description())];
    all.extend(of_sender.map(HandoffMessage::ToReceiver));
    all.extend(of_receiver.map(HandoffMessage::ToSender));
    all
}

#[test]
fn every_message_survives_encoding() {
    let all = messages();
    assert_eq!(all.len(), 15, "each kind, and a chunk of each body");
    for message in all {
        let bytes = message.encode();
        assert_eq!(HandoffMessage::decode(&bytes), Ok(message));
    }
}

#[test]
fn fields_of_later_versions_are_ignored() {
    for message in messages() {
        let mut bytes = message.encode();
        // Field 100, a number.
        bytes.extend([0xa0, 0x06, 0x2a]);
        assert_eq!(HandoffMessage::decode(&bytes), Ok(message));
    }
    // Field 90, of two bytes, is a kind that does not exist yet. Field 15 is a kind that no longer exists.
    for kind in [&[0xd2, 0x05][..], &[0x7a]] {
        let unknown = HandoffMessage::decode(&[kind, &[0x02, 0x08, 0x01]].concat());
        assert_eq!(unknown, Err(HandoffDecodeError::UnknownKind));
    }
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let refused = |message: HandoffMessage| HandoffMessage::decode(&message.encode()).err();
    let chunk = RoomChunk {
        id: 0,
        body: ChunkBody::Pages(PageRectangle {
            pages: 3..3,
            layers: 0..1,
        }),
        checksum: Checksum(0),
    };
    let chunk = HandoffMessage::ToReceiver(ToReceiver::Chunk { tag: TAG, chunk });
    assert_eq!(refused(chunk), Some(HandoffDecodeError::Field("rectangle")));
    let odd = RankDescription {
        tensor: (4, 4),
        ..description()
    };
    let odd = HandoffMessage::Register(odd);
    assert_eq!(refused(odd), Some(HandoffDecodeError::Field("tensor_rank")));
    let long = vec![0; MAX_HANDOFF_MESSAGE + 1];
    let long = HandoffMessage::decode(&long);
    assert!(matches!(long, Err(HandoffDecodeError::TooLong(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A mutated message is refused, or decodes to a message that survives encoding.
    #[test]
    fn mutated_messages_are_judged(
        which in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let all = messages();
        let mut bytes = which.get(&all).encode();
        for (at, value) in flips {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
        }
        if cut.index(4) == 0 {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        if let Ok(message) = HandoffMessage::decode(&bytes) {
            prop_assert_eq!(HandoffMessage::decode(&message.encode()), Ok(message));
        }
    }
}
