//! The messages by which both ends of a data-port connection set up RDMA queue pairs.
//!
//! ```text
//!  client: creates queue pairs   ── RdmaOpen ──► node: creates and connects its own
//!  client: connects              ◄─ RdmaOpened ─ with the registrations of its segments
//! ```
//!
//! A peer that registers memory on demand names no segment at that time. The client then asks with
//! `RdmaLocate`.

use super::data::{Meta, code, list, put_count};
use super::{DecodeError, Reader};
use crate::{Code, Incarnation, Length, SegmentId};

/// The address that a peer needs to connect to a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueAddress {
    /// The queue pair's number on its device.
    pub number: u32,
    /// The sequence number of its first packet.
    pub psn: u32,
    /// The GID of its port.
    pub gid: [u8; 16],
    /// The local identifier of its port; 0 on Ethernet.
    pub lid: u16,
    /// The path MTU in bytes.
    pub mtu: u32,
    /// The number of RDMA reads that the queue pair serves at once.
    pub reads: u8,
}

/// A queue pair offered by a client, and its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The queue pair.
    pub queue: QueueAddress,
    /// Whether the client writes through it; otherwise it only reads.
    pub writes: bool,
}

/// Offers queue pairs to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaOpen {
    /// The incarnation that the client expects.
    pub incarnation: Incarnation,
    /// The client's queue pairs.
    pub offers: Vec<Offer>,
}

/// The node's answer to one offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedOffer {
    /// The node's queue pair; number 0 when no port accepts the offer.
    pub queue: QueueAddress,
    /// The index of the node's port. Registrations belong to a port.
    pub rail: u8,
}

/// A segment's registration on one port of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The index of the port.
    pub rail: u8,
    /// The segment.
    pub segment: SegmentId,
    /// The address of the first byte.
    pub address: u64,
    /// The length in bytes.
    pub length: Length,
    /// The key for peers.
    pub rkey: u32,
}

/// Answers [`RdmaOpen`]: one answer per offer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaOpened {
    /// The answers to the offers.
    pub accepted: Vec<AcceptedOffer>,
    /// The registrations of the segments.
    pub registered: Vec<Registered>,
}

/// Answers a request to locate extents. For each extent it has the registrations of the range around it, one
/// per port, or the code of the refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaLocated(pub Vec<Result<Vec<Registered>, Code>>);

impl Meta for RdmaOpen {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.incarnation.to_bytes());
        put_count(out, self.offers.len());
        for offer in &self.offers {
            put_queue(out, &offer.queue);
            out.push(u8::from(offer.writes));
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "rdma open");
        let incarnation = Incarnation(r.u128()?);
        let offers = list(&mut r, |r| {
            let queue = queue(r)?;
            let writes = match r.u8()? {
                0 => false,
                1 => true,
                other => {
                    return Err(DecodeError::BadValue {
                        what: "flag of a queue pair",
                        value: other.into(),
                    });
                }
            };
            Ok(Offer { queue, writes })
        })?;
        r.finish()?;
        Ok(Self {
            incarnation,
            offers,
        })
    }
}

impl Meta for RdmaOpened {
    fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.accepted.len());
        for accepted in &self.accepted {
            put_queue(out, &accepted.queue);
            out.push(accepted.rail);
        }
        put_registered(out, &self.registered);
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "rdma opened");
        let accepted = list(&mut r, |r| {
            Ok(AcceptedOffer {
                queue: queue(r)?,
                rail: r.u8()?,
            })
        })?;
        let registered = registered(&mut r)?;
        r.finish()?;
        Ok(Self {
            accepted,
            registered,
        })
    }
}

impl Meta for RdmaLocated {
    fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.0.len());
        for item in &self.0 {
            let code = item.as_ref().err().copied().unwrap_or(Code::Ok);
            out.extend_from_slice(&code.to_wire().to_le_bytes());
            put_registered(out, item.as_deref().unwrap_or_default());
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "rdma located");
        let items = list(&mut r, |r| {
            let code = code(r)?;
            let registered = registered(r)?;
            Ok(if code == Code::Ok {
                Ok(registered)
            } else {
                Err(code)
            })
        })?;
        r.finish()?;
        Ok(Self(items))
    }
}

fn put_registered(out: &mut Vec<u8>, registered: &[Registered]) {
    put_count(out, registered.len());
    for registered in registered {
        out.push(registered.rail);
        out.extend_from_slice(&registered.segment.0.to_le_bytes());
        out.extend_from_slice(&registered.address.to_le_bytes());
        out.extend_from_slice(&registered.length.0.to_le_bytes());
        out.extend_from_slice(&registered.rkey.to_le_bytes());
    }
}

fn registered(r: &mut Reader<'_>) -> Result<Vec<Registered>, DecodeError> {
    list(r, |r| {
        Ok(Registered {
            rail: r.u8()?,
            segment: SegmentId(r.u32()?),
            address: r.u64()?,
            length: Length(r.u64()?),
            rkey: r.u32()?,
        })
    })
}

fn put_queue(out: &mut Vec<u8>, queue: &QueueAddress) {
    out.extend_from_slice(&queue.number.to_le_bytes());
    out.extend_from_slice(&queue.psn.to_le_bytes());
    out.extend_from_slice(&queue.gid);
    out.extend_from_slice(&queue.lid.to_le_bytes());
    out.extend_from_slice(&queue.mtu.to_le_bytes());
    out.push(queue.reads);
}

fn queue(r: &mut Reader<'_>) -> Result<QueueAddress, DecodeError> {
    Ok(QueueAddress {
        number: r.u32()?,
        psn: r.u32()?,
        gid: *r.array()?,
        lid: r.u16()?,
        mtu: r.u32()?,
        reads: r.u8()?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::data::check;
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn queues() -> impl Strategy<Value = QueueAddress> {
        let values = (
            any::<u32>(),
            any::<u32>(),
            any::<[u8; 16]>(),
            any::<u16>(),
            any::<u32>(),
            any::<u8>(),
        );
        values.prop_map(|(number, psn, gid, lid, mtu, reads)| QueueAddress {
            number,
            psn,
            gid,
            lid,
            mtu,
            reads,
        })
    }

    fn places() -> impl Strategy<Value = Registered> {
        let values = (
            any::<u8>(),
            any::<u32>(),
            any::<u64>(),
            any::<u64>(),
            any::<u32>(),
        );
        values.prop_map(|(rail, segment, address, length, rkey)| Registered {
            rail,
            segment: SegmentId(segment),
            address,
            length: Length(length),
            rkey,
        })
    }

    proptest! {
        #[test]
        fn offers_round_trip(incarnation: u128, offers in vec((queues(), any::<bool>()), 0..4)) {
            let offers = offers.into_iter().map(|(queue, writes)| Offer { queue, writes });
            check(&RdmaOpen {
                incarnation: Incarnation(incarnation),
                offers: offers.collect(),
            })?;
        }

        #[test]
        fn answers_to_offers_round_trip(
            accepted in vec((queues(), any::<u8>()), 0..4),
            registered in vec(places(), 0..4),
        ) {
            let accepted = accepted.into_iter().map(|(queue, rail)| AcceptedOffer { queue, rail });
            check(&RdmaOpened {
                accepted: accepted.collect(),
                registered,
            })?;
        }

        #[test]
        fn places_round_trip(items in vec(prop_oneof![
            vec(places(), 0..4).prop_map(Ok),
            Just(Err(Code::OutOfRange)),
        ], 0..4)) {
            check(&RdmaLocated(items))?;
        }
    }

    #[test]
    fn a_flag_is_one_bit() {
        let open = RdmaOpen {
            incarnation: Incarnation(1),
            offers: vec![Offer {
                queue: QueueAddress {
                    number: 1,
                    psn: 2,
                    gid: [3; 16],
                    lid: 4,
                    mtu: 5,
                    reads: 6,
                },
                writes: true,
            }],
        };
        let mut bytes = open.to_bytes();
        *bytes.last_mut().unwrap() = 2;
        assert!(RdmaOpen::decode(&bytes).is_err());
    }
}
