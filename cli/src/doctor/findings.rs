//! The problems, and their exit code.

use super::exposure;
use super::host::Host;
use super::node::Node;
use super::pool::{NamedPool, Pool};
use crate::connection::{Connection, HIDDEN, Transport};
use crate::silence::next_step;
use crate::{exit, masters, output};
use serde::Serialize;

/// With a lower limit of open files, a client of a large pool runs out of connections.
const FEW_FILES: u64 = 1024;

/// A problem, or a note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) weight: Weight,
    pub(crate) text: String,
}

/// The effect of a finding on the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Weight {
    /// A requested feature cannot work on this host, or the named masters are of several pools: exit code 1.
    Fails,
    /// The named pool, or a live node of it, cannot be reached as requested, or the pool takes no puts: exit code 4.
    Unreachable,
    /// No effect on the exit code.
    Note,
}

impl Finding {
    pub(super) const fn new(weight: Weight, text: String) -> Self {
        Self { weight, text }
    }
}

/// The findings about the host and the pool for a client with the settings of `connection`.
pub(super) fn of(host: &Host, pool: &Pool, connection: &Connection) -> Vec<Finding> {
    let mut findings = Vec::new();
    of_host(host, connection.transport, &mut findings);
    of_masters(pool, &mut findings);
    for node in &pool.nodes {
        findings.extend(of_node(node, connection.transport));
    }
    findings.extend(exposure::of(pool));
    let problems = pool.problems.iter().cloned();
    findings.extend(problems.map(|text| Finding::new(Weight::Note, text)));
    findings.sort_by_key(|finding| finding.weight);
    findings
}

/// The error with the exit code of the gravest finding; `Ok` if all are notes.
pub(crate) fn verdict(findings: &[Finding]) -> anyhow::Result<()> {
    // They are sorted by weight, the gravest first.
    match findings.first() {
        Some(Finding {
            weight: Weight::Unreachable,
            text,
        }) => Err(exit::Unreachable(text.clone()).into()),
        Some(Finding {
            weight: Weight::Fails,
            text,
        }) => Err(anyhow::anyhow!(text.clone())),
        Some(_) | None => Ok(()),
    }
}

fn of_host(host: &Host, transport: Transport, findings: &mut Vec<Finding>) {
    let mut add = |weight, text| findings.push(Finding::new(weight, text));
    if let Some(reason) = &host.rdma.reason
        && transport == Transport::Rdma
    {
        add(
            Weight::Fails,
            format!("--transport rdma is set, but RDMA is off: {reason}"),
        );
    }
    if host.rdma.reason.is_none()
        && !host.may_lock_all()
        && let Some(limit) = host.memlock_bytes
    {
        let text = format!(
            "RDMA registration locks memory, and the limit is {}: set it to unlimited \
             (LimitMEMLOCK=infinity, ulimit -l unlimited)",
            output::bytes(limit)
        );
        add(Weight::Note, text);
    }
    if let Some(limit) = host.open_files.filter(|limit| *limit < FEW_FILES) {
        let text = format!(
            "the limit of open files and connections is only {}: raise it (ulimit -n)",
            output::count(limit)
        );
        add(Weight::Note, text);
    }
}

fn of_masters(pool: &Pool, findings: &mut Vec<Finding>) {
    let mut add = |weight, text| findings.push(Finding::new(weight, text));
    for master in &pool.masters {
        if let Some(reason) = &master.reason {
            let text = format!("master {} does not answer: {reason}", master.address);
            add(Weight::Note, text);
        }
    }
    if let Some(text) = several_pools(&pool.pools) {
        add(Weight::Fails, text);
    }
    // Nodes leave a read-only leader, so this is the cause of the other problems.
    if let Some(why) = &pool.read_only {
        add(Weight::Unreachable, why.clone());
    }
    for alarm in &pool.alarms {
        add(Weight::Unreachable, masters::alarm(alarm));
    }
    if let Some(failure) = &pool.failure {
        let (weight, text) = match (pool.named, failure.unreachable) {
            (false, true) => (
                Weight::Note,
                format!(
                    "no pool was named (--master), and none answers at the default address: {}",
                    failure.reason
                ),
            ),
            (true, true) => (Weight::Unreachable, failure.reason.clone()),
            (_, false) => (Weight::Fails, failure.reason.clone()),
        };
        add(weight, text);
    } else if pool.is_hidden {
        add(Weight::Note, HIDDEN.to_owned());
    } else if !pool.nodes.iter().any(is_live) {
        let text = "the pool has no live node: nothing can be put".to_owned();
        add(Weight::Unreachable, text);
    }
}

/// The named masters with their pools, if these are several. A client would use any one of them.
fn several_pools(pools: &[NamedPool]) -> Option<String> {
    let (first, others) = pools.split_first()?;
    if others.iter().all(|one| one.cluster_id == first.cluster_id) {
        return None;
    }
    let named = pools.iter();
    let named = named.map(|one| format!("{} is of {}", one.address, one.cluster_id));
    let named: Vec<String> = named.collect();
    Some(format!(
        "the named masters are of several pools: {}. Name the masters of one pool",
        named.join(", ")
    ))
}

fn of_node(node: &Node, transport: Transport) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !is_live(node) {
        let text = format!(
            "node {} is {}: last heartbeat {:.1} s ago{}",
            node.name,
            node.state,
            node.heartbeat_age_seconds,
            next_step(&node.state)
        );
        findings.push(Finding::new(Weight::Note, text));
    }
    let tcp = node.ways.iter().find(|way| way.transport == Transport::Tcp);
    if node.way.is_none() && is_forbidden(node, transport) {
        let text = format!(
            "this token may not use the data port of node {}, so no way to it can be tried; the node answers",
            node.name
        );
        findings.push(Finding::new(Weight::Note, text));
    } else if node.way.is_none() {
        let tried = node
            .ways
            .iter()
            .filter(|way| transport == Transport::Auto || way.transport == transport)
            .map(|way| format!("{}: {}", output::label(&way.transport), way.reason));
        let tried: Vec<String> = tried.collect();
        // The pool does without a node that its master has given up.
        let weight = if is_live(node) {
            Weight::Unreachable
        } else {
            Weight::Note
        };
        let text = format!("node {} cannot be reached: {}", node.name, tried.join("; "));
        findings.push(Finding::new(weight, text));
    }
    if let Some(tcp) = tcp
        && node.way.is_some_and(|way| way != Transport::Tcp)
        && is_live(node)
        && !tcp.works
    {
        let text = format!(
            "node {} is reached from this host alone: tcp: {}",
            node.name, tcp.reason
        );
        findings.push(Finding::new(Weight::Note, text));
    }
    findings
}

/// Whether the data port refuses this token, and the transports that `transport` allows fail for that reason.
fn is_forbidden(node: &Node, transport: Transport) -> bool {
    let forbids = |transport: Transport| {
        let mut ways = node.ways.iter();
        ways.any(|way| way.transport == transport && way.is_forbidden)
    };
    // A client that may use every transport needs no other one than TCP.
    let asked = match transport {
        Transport::Auto => Transport::Tcp,
        one => one,
    };
    forbids(Transport::Tcp) && forbids(asked)
}

fn is_live(node: &Node) -> bool {
    node.state == "live"
}

#[cfg(test)]
mod tests {
    use super::super::node::Way;
    use super::*;

    fn way(transport: Transport, works: bool) -> Way {
        Way {
            transport,
            works,
            reason: "because".to_owned(),
            is_forbidden: false,
            opened_micros: None,
            round_trip_micros: None,
        }
    }

    fn node(state: &str, way: Option<Transport>, ways: Vec<Way>) -> Node {
        Node {
            name: "node-1".to_owned(),
            state: state.to_owned(),
            data_address: String::new(),
            heartbeat_age_seconds: 2.0,
            takes_strangers: None,
            same_host: None,
            way,
            ways,
        }
    }

    fn weights(findings: &[Finding]) -> Vec<Weight> {
        findings.iter().map(|finding| finding.weight).collect()
    }

    #[test]
    fn only_live_nodes_have_to_be_reached() {
        let dead = || vec![way(Transport::Rdma, false), way(Transport::Tcp, false)];
        let found = of_node(&node("live", None, dead()), Transport::Auto);
        assert_eq!(weights(&found), [Weight::Unreachable]);
        assert!(found[0].text.contains("rdma: because; tcp: because"));
        let found = of_node(&node("suspect", None, dead()), Transport::Rdma);
        assert_eq!(weights(&found), [Weight::Note, Weight::Note]);
        assert!(found[0].text.contains("Look at its host"), "{found:?}");
        assert!(!found[1].text.contains("tcp"), "{found:?}");
        let fine = vec![way(Transport::Tcp, true)];
        let fine = node("live", Some(Transport::Tcp), fine);
        assert!(of_node(&fine, Transport::Auto).is_empty());
        let near = vec![way(Transport::Shm, true), way(Transport::Tcp, false)];
        let found = of_node(&node("live", Some(Transport::Shm), near), Transport::Auto);
        assert_eq!(weights(&found), [Weight::Note]);
        assert!(found[0].text.contains("this host alone: tcp: because"));
    }

    /// An operator's token shows the pool and moves no bytes.
    #[test]
    fn a_data_port_that_the_token_may_not_use_is_a_note() {
        let forbidden = Way {
            is_forbidden: true,
            ..way(Transport::Tcp, false)
        };
        let untried = Way {
            is_forbidden: true,
            ..way(Transport::Rdma, false)
        };
        let no_socket = way(Transport::Shm, false);
        let ways = vec![no_socket.clone(), untried, forbidden.clone()];
        for transport in [Transport::Auto, Transport::Rdma, Transport::Tcp] {
            let found = of_node(&node("live", None, ways.clone()), transport);
            assert_eq!(weights(&found), [Weight::Note]);
            assert!(
                found[0]
                    .text
                    .contains("may not use the data port of node node-1")
            );
        }
        // A transport that fails for another reason fails with every token.
        let ways = vec![no_socket, way(Transport::Rdma, false), forbidden];
        for transport in [Transport::Shm, Transport::Rdma] {
            let found = of_node(&node("live", None, ways.clone()), transport);
            assert_eq!(weights(&found), [Weight::Unreachable]);
            assert!(found[0].text.contains("because"), "{found:?}");
        }
        // Strict isolation refuses shared memory to tokens that the data port takes.
        let isolated = Way {
            is_forbidden: true,
            ..way(Transport::Shm, false)
        };
        let ways = vec![isolated, way(Transport::Tcp, true)];
        let found = of_node(&node("live", None, ways), Transport::Shm);
        assert_eq!(weights(&found), [Weight::Unreachable]);
    }

    #[test]
    fn only_what_was_asked_for_leads_to_an_exit_code() {
        let code = |weights: &[Weight]| {
            let findings: Vec<Finding> = weights
                .iter()
                .map(|weight| Finding::new(*weight, String::new()))
                .collect();
            verdict(&findings).err().map(|error| exit::code(&error))
        };
        assert_eq!(code(&[]), None);
        assert_eq!(code(&[Weight::Note]), None);
        assert_eq!(code(&[Weight::Unreachable, Weight::Note]), Some(4));
        assert_eq!(code(&[Weight::Fails, Weight::Unreachable]), Some(1));
        assert!(Weight::Fails < Weight::Unreachable && Weight::Unreachable < Weight::Note);
    }

    fn pool() -> Pool {
        Pool {
            asked: "http://a:1,http://b:1".to_owned(),
            named: true,
            failure: None,
            leader: None,
            read_only: None,
            alarms: Vec::new(),
            pools: Vec::new(),
            masters: Vec::new(),
            nodes: vec![node("live", Some(Transport::Tcp), Vec::new())],
            is_hidden: false,
            has_token: false,
            takes_strangers: None,
            problems: Vec::new(),
        }
    }

    fn found(pool: &Pool) -> Vec<Finding> {
        let mut findings = Vec::new();
        of_masters(pool, &mut findings);
        findings
    }

    #[test]
    fn each_alarm_of_the_metadata_store_fails() {
        let mut pool = pool();
        assert!(found(&pool).is_empty());
        pool.alarms = vec!["/data is full".to_owned(), "NOSPACE".to_owned()];
        let alarms = found(&pool);
        assert_eq!(weights(&alarms), [Weight::Unreachable; 2]);
        assert!(alarms[0].text.contains("/data is full"), "{alarms:?}");
        assert!(alarms[1].text.contains("NOSPACE"), "{alarms:?}");
    }

    #[test]
    fn masters_of_several_pools_fail_with_the_pool_of_each() {
        let mut pool = pool();
        let named = |address: &str, cluster_id: &str| NamedPool {
            address: address.to_owned(),
            cluster_id: cluster_id.to_owned(),
        };
        pool.pools = vec![named("http://a:1", "1d"), named("http://b:1", "1d")];
        assert!(found(&pool).is_empty());
        pool.pools.push(named("http://c:1", "2e"));
        let several = found(&pool);
        assert_eq!(weights(&several), [Weight::Fails]);
        for part in ["http://a:1 is of 1d", "http://c:1 is of 2e"] {
            assert!(several[0].text.contains(part), "{several:?}");
        }
    }

    #[test]
    fn limits_count_where_there_is_rdma() {
        let (mut host, _) = Host::read();
        host.rdma.reason = Some("this host has no RDMA device".to_owned());
        host.open_files = None;
        (host.memlock_bytes, host.may_lock_more) = (Some(64 << 10), false);
        let found = |host: &Host, transport| {
            let mut findings = Vec::new();
            of_host(host, transport, &mut findings);
            findings
        };
        assert!(found(&host, Transport::Auto).is_empty());
        let asked = found(&host, Transport::Rdma);
        assert_eq!(weights(&asked), [Weight::Fails]);
        assert!(asked[0].text.contains("no RDMA device"), "{asked:?}");
        host.rdma.reason = None;
        let limited = found(&host, Transport::Auto);
        assert_eq!(weights(&limited), [Weight::Note]);
        assert!(limited[0].text.contains("LimitMEMLOCK=infinity"));
        host.may_lock_more = true;
        assert!(found(&host, Transport::Auto).is_empty());
    }
}
