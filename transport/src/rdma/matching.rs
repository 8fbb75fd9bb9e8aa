//! Chooses the node's port for a client's port: one on the same subnet, as far as addresses tell.
//!
//! A GID does not hold the length of its subnet's prefix, and link-local GIDs of two fabrics look
//! alike. So addresses give a proposal, and the client's probe decides.
//!
//! ADR 0030 says how ports are paired.

use kvpool_types::wire::rdma::QueueAddress;

/// The most prefix bits that are compared. An IPv4 address is the last 32 bits of its GID.
const IPV4_SUBNET: u32 = 24;
const IPV6_SUBNET: u32 = 64;
/// Prefixes are compared in whole steps of this many bits.
const IPV4_STEP: u32 = 8;
const IPV6_STEP: u32 = 16;

/// The address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) gid: [u8; 16],
    /// The local identifier; 0 on Ethernet.
    pub(super) lid: u16,
}

/// The kinds of GID on Ethernet. Different kinds cannot reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Ipv4,
    LinkLocal,
    Ipv6,
}

impl Port {
    pub(super) const fn of(queue: &QueueAddress) -> Self {
        Self {
            gid: queue.gid,
            lid: queue.lid,
        }
    }

    fn family(&self) -> Family {
        const IPV4: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        if self.gid.starts_with(&IPV4) {
            Family::Ipv4
        } else if self.gid.starts_with(&[0xfe, 0x80]) {
            Family::LinkLocal
        } else {
            Family::Ipv6
        }
    }

    /// How near two ports are; more is nearer. `None` when no packet of one port can reach the
    /// other port.
    fn nearness(&self, other: &Self) -> Option<u32> {
        let common =
            (u128::from_be_bytes(self.gid) ^ u128::from_be_bytes(other.gid)).leading_zeros();
        match (self.lid, other.lid) {
            (0, 0) => {
                let family = self.family();
                (family == other.family()).then(|| match family {
                    Family::Ipv4 => (common.saturating_sub(96)).min(IPV4_SUBNET) / IPV4_STEP,
                    Family::LinkLocal | Family::Ipv6 => common.min(IPV6_SUBNET) / IPV6_STEP,
                })
            }
            (0, _) | (_, 0) => None,
            // A prefix names an InfiniBand subnet; other subnets may be routed to.
            _ => Some(u32::from(common >= IPV6_SUBNET)),
        }
    }
}

/// The port for an offer from `client`: of the nearest ports, the one with the fewest accepted
/// offers. `None` when none is reachable. A port that is down is `None` in `ports`.
pub(super) fn choose(ports: &[Option<Port>], accepted: &[usize], client: &Port) -> Option<usize> {
    let near = |at: usize| ports.get(at).copied().flatten()?.nearness(client);
    let load = |at: usize| accepted.get(at).copied().unwrap_or_default();
    (0..ports.len())
        .filter_map(|at| Some((near(at)?, at)))
        .max_by_key(|(near, at)| (*near, std::cmp::Reverse((load(*at), *at))))
        .map(|(_, at)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(address: [u8; 4]) -> Port {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&address);
        Port { gid, lid: 0 }
    }

    fn gid(start: &[u8], last: u8) -> Port {
        let mut gid = [0; 16];
        gid[..start.len()].copy_from_slice(start);
        gid[15] = last;
        Port { gid, lid: 0 }
    }

    /// Accepts offers in order. Returns the port of each.
    fn all(ports: &[Option<Port>], clients: &[Port]) -> Vec<Option<usize>> {
        let mut accepted = vec![0; ports.len()];
        let choose = |client| {
            let chosen = choose(ports, &accepted, client);
            if let Some(at) = chosen {
                accepted[at] += 1;
            }
            chosen
        };
        clients.iter().map(choose).collect()
    }

    #[test]
    fn ports_are_matched_by_subnet_whatever_their_order() {
        let node = [Some(ipv4([10, 0, 2, 9])), Some(ipv4([10, 0, 1, 9]))];
        let client = [ipv4([10, 0, 1, 5]), ipv4([10, 0, 2, 5])];
        let twice = [client[0], client[1], client[0], client[1]];
        assert_eq!(all(&node, &twice), [Some(1), Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn a_down_port_does_not_change_the_other_pairs() {
        let node = [None, Some(ipv4([10, 0, 2, 9]))];
        // A router may reach the other subnet; the probe decides.
        let client = [ipv4([10, 0, 2, 5]), ipv4([10, 0, 1, 5])];
        assert_eq!(all(&node, &client), [Some(1), Some(1)]);
        assert_eq!(all(&[None, None], &client), [None, None]);
    }

    #[test]
    fn ports_of_one_subnet_take_turns() {
        let node = [Some(ipv4([10, 0, 1, 1])), Some(ipv4([10, 0, 1, 200]))];
        let client = [ipv4([10, 0, 1, 201]); 4];
        assert_eq!(all(&node, &client), [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn fabrics_of_other_kinds_are_never_matched() {
        let infiniband = Port {
            lid: 7,
            ..gid(&[0xfe, 0x80], 1)
        };
        let node = [Some(infiniband)];
        assert_eq!(all(&node, &[gid(&[0xfe, 0x80], 2)]), [None]);
        assert_eq!(
            all(
                &node,
                &[Port {
                    lid: 9,
                    ..infiniband
                }]
            ),
            [Some(0)]
        );
        let node = [Some(gid(&[0x20, 0x01], 1)), Some(gid(&[0xfe, 0x80], 1))];
        assert_eq!(all(&node, &[ipv4([10, 0, 0, 1])]), [None]);
        assert_eq!(all(&node, &[gid(&[0xfe, 0x80], 3)]), [Some(1)]);
        assert_eq!(all(&node, &[gid(&[0x20, 0x01], 3)]), [Some(0)]);
    }

    #[test]
    fn a_subnet_of_infiniband_is_its_prefix() {
        let port = |prefix: u8, lid: u16| Port {
            lid,
            ..gid(&[0xfe, 0x80, 0, 0, 0, 0, 0, prefix], 1)
        };
        let node = [Some(port(1, 4)), Some(port(2, 5))];
        assert_eq!(all(&node, &[port(2, 9), port(1, 8)]), [Some(1), Some(0)]);
    }
}
