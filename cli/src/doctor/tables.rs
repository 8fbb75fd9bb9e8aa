//! The tables for people.

use super::Report;
use super::findings::Weight;
use super::host::{Host, Port};
use super::node::{Node, Way};
use super::pool::Pool;
use crate::output;

pub(super) fn tables(report: &Report) -> String {
    let mut out = vec![format!("this host\n{}", host(&report.host))];
    if !report.host.rdma.ports.is_empty() {
        out.push(format!("RDMA ports\n{}", ports(&report.host.rdma.ports)));
    }
    out.push(format!("the pool\n{}", pool(&report.pool)));
    if !report.pool.nodes.is_empty() {
        out.push(format!(
            "transports to its nodes\n{}",
            nodes(&report.pool.nodes)
        ));
    }
    if report.findings.is_empty() {
        out.push("No problems found.".to_owned());
    }
    for finding in &report.findings {
        let word = match finding.weight {
            Weight::Unreachable | Weight::Fails => "fails",
            Weight::Note => "note",
        };
        out.push(format!("{word}: {}", finding.text));
    }
    out.join("\n")
}

fn host(host: &Host) -> String {
    let mut facts = output::facts();
    let rdma = match &host.rdma.reason {
        Some(reason) => format!("off: {reason}"),
        None => {
            let names = host.rdma.ports.iter().map(|port| port.name.as_str());
            names.collect::<Vec<_>>().join(", ")
        }
    };
    facts.add_row(["RDMA", &rdma]);
    facts.add_row(["limit of locked memory", &memlock(host)]);
    let memory = format!(
        "{}, {} available",
        output::bytes(host.memory_bytes),
        output::bytes(host.memory_available_bytes)
    );
    facts.add_row(["memory", &memory]);
    let pages = &host.huge_pages;
    let huge = match pages.total {
        0 => "none reserved".to_owned(),
        total => format!(
            "{} of {} reserved, {} free",
            output::count(total),
            output::bytes(pages.page_bytes),
            output::count(pages.free)
        ),
    };
    facts.add_row(["huge pages", &huge]);
    let files = host
        .open_files
        .map_or("unlimited".to_owned(), output::count);
    facts.add_row(["open files", &files]);
    facts.add_row(["cores", &host.cores.to_string()]);
    facts.to_string()
}

fn memlock(host: &Host) -> String {
    let limit = match host.memlock_bytes {
        None => return "unlimited".to_owned(),
        Some(limit) => output::bytes(limit),
    };
    if host.may_lock_more {
        format!("{limit}; CAP_IPC_LOCK lifts it")
    } else if host.may_lock_all() {
        limit
    } else {
        format!("{limit}; RDMA needs unlimited")
    }
}

fn ports(ports: &[Port]) -> String {
    let mut table = output::table([
        "port",
        "Gb/s",
        "NUMA node",
        "GID",
        "MTU",
        "largest work request",
        "parts",
        "queue",
        "reads out/in",
        "registrations",
    ]);
    for port in ports {
        table.add_row([
            port.name.clone(),
            port.gigabits.to_string(),
            port.numa_node
                .map_or("-".to_owned(), |node| node.to_string()),
            port.gid_index.to_string(),
            port.mtu.to_string(),
            output::bytes(port.slice_bytes.into()),
            port.scatter.to_string(),
            port.queue_depth.to_string(),
            format!("{}/{}", port.reads_out, port.reads_in),
            format!(
                "{} of up to {}",
                output::count(port.registrations.into()),
                output::bytes(port.registration_bytes)
            ),
        ]);
    }
    table.to_string()
}

fn pool(pool: &Pool) -> String {
    let mut facts = output::facts();
    facts.add_row(["asked", &pool.asked]);
    if let Some(failure) = &pool.failure {
        facts.add_row(["failure", &failure.reason]);
    }
    if !pool.masters.is_empty() {
        let leader = pool.leader.as_deref().unwrap_or("none");
        facts.add_row(["leader", leader]);
    }
    for master in &pool.masters {
        let mut told = vec![master.address.clone()];
        told.extend(master.role.clone());
        told.extend(master.version.clone());
        let no_answer = master.reason.as_ref();
        told.extend(no_answer.map(|reason| format!("does not answer: {reason}")));
        facts.add_row(["master", &told.join(", ")]);
    }
    facts.to_string()
}

/// One row for each transport to each node.
fn nodes(nodes: &[Node]) -> String {
    let mut table = output::table(["node", "state", "address", "transport", "", "reason"]);
    for node in nodes {
        for (number, way) in node.ways.iter().enumerate() {
            let [name, state, address] = match number {
                0 => [&node.name, &node.state, &node.data_address].map(String::clone),
                _ => [const { String::new() }; 3],
            };
            let word = match way {
                Way { works: false, .. } => "no",
                way if node.way == Some(way.transport) => "taken",
                _ => "works",
            };
            table.add_row([
                name,
                state,
                address,
                output::label(&way.transport),
                word.to_owned(),
                why(way),
            ]);
        }
    }
    table.to_string()
}

fn why(way: &Way) -> String {
    let mut text = way.reason.clone();
    if let Some(opened) = way.opened_micros {
        text.push_str(&format!(", opened in {}", output::micros(opened)));
    }
    if let Some(round_trip) = way.round_trip_micros {
        text.push_str(&format!(", round trip {}", output::micros(round_trip)));
    }
    text
}
