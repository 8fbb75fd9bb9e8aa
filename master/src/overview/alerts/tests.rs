use super::*;
use crate::overview::{Fill, MasterFacts};

fn node(state: &'static str) -> NodeFacts {
    NodeFacts {
        name: format!("n-{state}"),
        state,
        silent_ms: Some(4500),
        fill: Fill::default(),
        ..NodeFacts::default()
    }
}

/// A leader with one live node and a standby that follows the log.
fn healthy() -> Overview {
    Overview {
        role: "leader",
        leader: "http://a:1".to_owned(),
        store: "etcd".to_owned(),
        masters: vec![MasterFacts {
            address: "http://b:1".to_owned(),
            role: "standby".to_owned(),
            lag: MUCH_LAG,
            ..MasterFacts::default()
        }],
        pool: Some(PoolFacts {
            capacity_bytes: 1000,
            used_bytes: 940,
            low_watermark_bytes: 900,
            high_watermark_bytes: 950,
            quarantine_bytes: 100,
            ..PoolFacts::default()
        }),
        nodes: vec![node("live")],
        ..Overview::default()
    }
}

fn judged(mut overview: Overview, recent: &Recent) -> Vec<Alert> {
    judge(&mut overview, recent);
    overview.alerts
}

fn kinds(overview: Overview) -> Vec<AlertKind> {
    let alerts = judged(overview, &Recent::default());
    alerts.into_iter().map(|alert| alert.kind).collect()
}

#[test]
fn a_healthy_pool_has_no_alert_however_full_it_is() {
    assert_eq!(kinds(healthy()), []);
}

#[test]
fn each_state_of_a_node_but_live_has_its_alert_with_the_name_and_an_action() {
    let mut ill = healthy();
    ill.nodes
        .extend(["drained", "draining", "gone", "suspect", "unreported"].map(node));
    let alerts = judged(ill, &Recent::default());
    let kinds: Vec<_> = alerts.iter().map(|alert| alert.kind).collect();
    assert_eq!(
        kinds,
        [
            AlertKind::NodeSuspect,
            AlertKind::NodeGone,
            AlertKind::NodeUnreported,
            AlertKind::NodeDraining,
            AlertKind::NodeDrained
        ]
    );
    for alert in &alerts {
        assert!(alert.message.contains(&alert.object), "{alert:?}");
        assert!(alert.message.contains(". "), "an action follows: {alert:?}");
    }
    assert!(alerts[0].message.contains("4 s"), "{alerts:?}");
}

/// An operator stops a node that needs no action.
#[test]
fn a_draining_node_whose_stop_would_lose_blocks_says_how_many_and_what_to_do() {
    let drains = |left_blocks, has_media: bool| {
        let mut pool = healthy();
        let mut node = node("draining");
        node.left_blocks = left_blocks;
        if has_media {
            node.media.push(MediumFacts {
                id: "m".to_owned(),
                state: "ready",
                capacity_bytes: 1,
                used_bytes: 0,
                copies: 0,
            });
        }
        pool.nodes.push(node);
        let mut alerts = judged(pool, &Recent::default());
        assert_eq!(alerts.len(), 1, "{alerts:?}");
        alerts.remove(0)
    };
    for left in [None, Some(0)] {
        let alert = drains(left, false);
        assert_eq!(alert.severity, Severity::Notice);
        let message = alert.message;
        assert!(message.contains("No action is needed"), "{message}");
        assert!(!message.contains("lose"), "{message}");
    }
    for (has_media, severity) in [(false, Severity::Warning), (true, Severity::Notice)] {
        let alert = drains(Some(301), has_media);
        assert_eq!(alert.severity, severity);
        let message = alert.message;
        assert!(message.contains("would lose 301 blocks"), "{message}");
        assert!(
            message.to_lowercase().contains("add a store node"),
            "{message}"
        );
        assert!(!message.contains("action is needed"), "{message}");
    }
}

/// The task ends with its leader. Nobody has tried to move the blocks since.
#[test]
fn a_draining_node_whose_blocks_no_task_moves_asks_first_for_a_drain() {
    let mut pool = healthy();
    let mut node = node("draining");
    node.left_blocks = Some(301);
    pool.nodes.push(node);
    let message = judged(pool, &Recent::default()).remove(0).message;
    assert!(message.contains("no task moves them. Run"), "{message}");
    let (drain, room) = ("kvctl node drain n-draining", "add a store node");
    assert!(message.find(drain) < message.find(room), "{message}");
    assert!(message.contains(drain), "{message}");
}

/// A node with a medium that has `copies` copies. Its media do not come back.
fn empties(state: &'static str, left_blocks: Option<u64>, copies: u64) -> Alert {
    let mut pool = healthy();
    let mut node = node(state);
    node.left_blocks = left_blocks;
    node.media_leave = true;
    node.media.push(MediumFacts {
        id: "m".to_owned(),
        state: "ready",
        capacity_bytes: 1,
        used_bytes: 1,
        copies,
    });
    pool.nodes.push(node);
    let mut alerts = judged(pool, &Recent::default());
    assert_eq!(alerts.len(), 1, "{alerts:?}");
    alerts.remove(0)
}

/// The SSDs of the node go too, so a copy on them is no safe place.
#[test]
fn a_node_that_empties_its_media_says_how_far_it_is_and_never_that_it_copies_to_its_ssd() {
    for left in [None, Some(0)] {
        let alert = empties("draining", left, 17);
        assert_eq!(alert.severity, Severity::Notice);
        let message = alert.message;
        assert!(message.contains("hold 17 copies"), "{message}");
        assert!(message.contains("No action is needed"), "{message}");
        assert!(!message.contains("lost"), "{message}");
    }
    let alert = empties("draining", Some(301), 400);
    assert_eq!(alert.severity, Severity::Warning);
    let message = alert.message;
    assert!(message.contains("hold 400 copies"), "{message}");
    assert!(message.contains("301 blocks would be lost"), "{message}");
    assert!(
        message.contains("kvctl node drain n-draining --ssd"),
        "{message}"
    );
    assert!(!message.contains("copies blocks to its SSD"), "{message}");
}

#[test]
fn a_drained_node_says_whether_its_disks_are_still_needed() {
    let message = empties("drained", Some(0), 3).message;
    assert!(message.contains("not needed"), "{message}");
    assert!(message.contains("kvctl ssd detach"), "{message}");
    let mut pool = healthy();
    pool.nodes.push(node("drained"));
    let alone = judged(pool.clone(), &Recent::default()).remove(0).message;
    assert!(!alone.contains("disks"), "{alone}");
    pool.nodes[1].media.push(MediumFacts {
        id: "m".to_owned(),
        state: "ready",
        capacity_bytes: 1,
        used_bytes: 1,
        copies: 3,
    });
    let kept = judged(pool, &Recent::default()).remove(0).message;
    assert!(kept.contains("Keep its disks"), "{kept}");
}

/// The drain of a node that stops cannot be ended, and nobody needs to stop it.
#[test]
fn a_drained_node_that_stops_does_not_ask_for_a_stop_nor_for_the_end_of_its_drain() {
    let medium = MediumFacts {
        id: "m".to_owned(),
        state: "ready",
        capacity_bytes: 1,
        used_bytes: 1,
        copies: 3,
    };
    let said = |media: &[MediumFacts], media_leave, stops| {
        let mut pool = healthy();
        let mut node = node("drained");
        node.media = media.to_vec();
        node.media_leave = media_leave;
        node.stops = stops;
        pool.nodes.push(node);
        judged(pool, &Recent::default()).remove(0).message
    };
    let stays = said(&[], false, false);
    assert!(stays.contains("Stop it"), "{stays}");
    assert!(stays.contains("kvctl node undrain"), "{stays}");
    let alone = said(&[], false, true);
    assert!(alone.contains("It stops now: start it again"), "{alone}");
    let kept = said(std::slice::from_ref(&medium), false, true);
    assert!(kept.contains("It stops now. Keep its disks"), "{kept}");
    let emptied = said(&[medium], true, true);
    assert!(emptied.contains("once it has stopped"), "{emptied}");
    for message in [alone, kept, emptied] {
        assert!(!message.contains("undrain"), "{message}");
        assert!(!message.to_lowercase().contains("stop it"), "{message}");
    }
}

/// It is gone in a moment, so another drain would move nothing.
#[test]
fn a_draining_node_that_stops_does_not_ask_for_another_drain() {
    let medium = MediumFacts {
        id: "m".to_owned(),
        state: "ready",
        capacity_bytes: 1,
        used_bytes: 1,
        copies: 3,
    };
    let said = |media: &[MediumFacts], media_leave, left_blocks| {
        let mut pool = healthy();
        let mut node = node("draining");
        node.media = media.to_vec();
        node.media_leave = media_leave;
        node.left_blocks = left_blocks;
        node.stops = true;
        pool.nodes.push(node);
        judged(pool, &Recent::default()).remove(0)
    };
    let alone = said(&[], false, Some(301));
    assert_eq!(alone.severity, Severity::Warning);
    let copies = said(std::slice::from_ref(&medium), false, Some(301));
    assert_eq!(copies.severity, Severity::Notice);
    for message in [alone.message, copies.message] {
        assert!(message.contains("It stops"), "{message}");
        assert!(message.contains("301 blocks"), "{message}");
        assert!(!message.contains("again"), "{message}");
        assert!(!message.contains("repeat the drain"), "{message}");
        assert!(!message.contains("store node"), "{message}");
    }
    for (left, severity) in [(None, Severity::Notice), (Some(301), Severity::Warning)] {
        let alert = said(std::slice::from_ref(&medium), true, left);
        assert_eq!(alert.severity, severity);
        let message = alert.message;
        assert!(
            message.contains("Keep its SSDs, start it again"),
            "{message}"
        );
        assert_eq!(message.contains("301 blocks"), left.is_some(), "{message}");
        assert!(!message.contains("Keep it running"), "{message}");
    }
}

#[test]
fn a_pool_without_a_live_node_comes_first() {
    let mut ill = healthy();
    ill.nodes = vec![node("suspect")];
    assert_eq!(kinds(ill), [AlertKind::NoLiveNode, AlertKind::NodeSuspect]);
}

/// The blocks of draining nodes are served, and an operator can end a drain.
#[test]
fn a_pool_whose_nodes_all_drain_says_how_to_take_one_back() {
    let said = |states: &[&'static str]| {
        let mut ill = healthy();
        ill.nodes = states.iter().copied().map(node).collect();
        judged(ill, &Recent::default()).remove(0)
    };
    for state in ["draining", "drained"] {
        let alert = said(&["suspect", state]);
        assert_eq!(alert.kind, AlertKind::NoLiveNode);
        let undrain = format!("kvctl node undrain n-{state}");
        assert!(alert.message.contains(&undrain), "{}", alert.message);
        assert!(!alert.message.contains("gets fail"), "{}", alert.message);
    }
    let mut ill = healthy();
    ill.nodes = vec![node("draining")];
    ill.nodes[0].stops = true;
    let message = judged(ill, &Recent::default()).remove(0).message;
    assert!(message.contains("draining nodes succeed"), "{message}");
    assert!(!message.contains("undrain"), "{message}");
    let alert = said(&["suspect"]);
    assert!(alert.message.contains("gets fail"), "{}", alert.message);
    assert!(!alert.message.contains("undrain"), "{}", alert.message);
}

/// Without the alert, nothing but a line in the log of the node tells that its SSD is not used.
#[test]
fn a_medium_that_its_node_does_not_use_has_one_alert_with_its_path_and_the_reason() {
    let mut ill = healthy();
    ill.nodes[0].media.push(MediumFacts {
        id: "d15c".to_owned(),
        state: "refused",
        capacity_bytes: 1,
        used_bytes: 0,
        copies: 7,
    });
    ill.nodes[0].unused_media.push(UnusedFacts {
        path: "/mnt/nvme/blocks".to_owned(),
        reason: "it belongs to pool a, this is pool b".to_owned(),
        id: "d15c".to_owned(),
    });
    let alerts = judged(ill, &Recent::default());
    assert_eq!(alerts.len(), 1, "{alerts:?}");
    assert_eq!(alerts[0].kind, AlertKind::Medium);
    assert_eq!(
        alerts[0].message,
        "Node n-live does not use /mnt/nvme/blocks: it belongs to pool a, this is pool b"
    );
}

#[test]
fn every_state_of_a_medium_but_ready_has_its_alert() {
    let mut ill = healthy();
    ill.nodes[0].media = crate::pool::MEDIUM_STATES
        .iter()
        // The report of the node is the alert of such a medium.
        .filter(|state| **state != "refused")
        .map(|state| MediumFacts {
            id: format!("id-{state}"),
            state,
            capacity_bytes: 1,
            used_bytes: 0,
            copies: 7,
        })
        .collect();
    let alerts = judged(ill, &Recent::default());
    assert_eq!(alerts.len(), crate::pool::MEDIUM_STATES.len() - 2);
    for alert in alerts {
        assert!(alert.message.contains(&alert.object) && alert.message.contains("n-live"));
        assert_eq!(alert.metric, "kvpool_master_media");
    }
}

#[test]
fn waiting_puts_are_an_alert_only_when_memory_is_full() {
    let waited = Recent {
        puts_waited: true,
        ..Recent::default()
    };
    let alerts = judged(healthy(), &waited);
    assert_eq!(alerts[0].kind, AlertKind::PutsWait);
    assert!(alerts[0].message.contains("94 %"), "{alerts:?}");
    let mut roomy = healthy();
    roomy.pool.as_mut().unwrap().used_bytes = 899;
    assert_eq!(judged(roomy, &waited), []);
}

#[test]
fn masters_and_their_store_are_judged_on_every_master() {
    let mut ill = healthy();
    ill.masters[0].lag = MUCH_LAG + 1;
    assert_eq!(kinds(ill), [AlertKind::StandbyLag]);
    let mut alone = healthy();
    alone.masters.clear();
    assert_eq!(kinds(alone), [AlertKind::NoStandby]);
    let standby = Overview {
        role: "standby",
        leader: String::new(),
        pool: None,
        nodes: Vec::new(),
        ..healthy()
    };
    assert_eq!(kinds(standby.clone()), [AlertKind::NoLeader]);
    let leader = "http://a:1".to_owned();
    assert_eq!(kinds(Overview { leader, ..standby }), []);
    let mut lapsed = healthy();
    lapsed.role = "read-only";
    lapsed.store_alarms.push("NOSPACE".to_owned());
    assert_eq!(kinds(lapsed), [AlertKind::ReadOnly, AlertKind::StoreAlarm]);
}

#[test]
fn files_of_tokens_keys_and_certificates_that_cannot_be_used_are_alerts() {
    let mut ill = healthy();
    ill.problems.push("the JWKS cannot be used".to_owned());
    ill.nodes[0].problems.push("the token ends soon".to_owned());
    let alerts = judged(ill, &Recent::default());
    let told: Vec<_> = alerts
        .iter()
        .map(|alert| (alert.kind, alert.object.as_str(), alert.message.as_str()))
        .collect();
    let files = AlertKind::Files;
    let expected = [
        (files, "", "This master says: the JWKS cannot be used"),
        (files, "n-live", "Node n-live says: the token ends soon"),
    ];
    assert_eq!(told, expected);
}

#[test]
fn faults_stuck_quarantine_and_a_failed_store_are_alerts() {
    let mut ill = healthy();
    let pool = ill.pool.as_mut().unwrap();
    (pool.quarantine_bytes, pool.store_failure) = (110, "disk".to_owned());
    let recent = Recent {
        faults: Totals {
            replicas_corrupt: 1,
            checksum_reports: 2,
            unreachable_reports: 3,
            blocks_lost: 4,
            // This counter is not a fault.
            blocks_committed: 5,
            ..Totals::default()
        },
        ..Recent::default()
    };
    let alerts = judged(ill, &recent);
    let faults = alerts.iter().filter(|alert| alert.kind == AlertKind::Fault);
    let faults: Vec<&str> = faults.map(|alert| alert.message.as_str()).collect();
    assert_eq!(faults.len(), 4);
    let one = "In the last minutes 1 replica was corrupt on its own node. ";
    assert!(faults[0].starts_with(one), "{faults:?}");
    // A client reports a replica each time that it fails to read it.
    let reports =
        "In the last minutes 3 reports of clients named replicas that they could not reach. ";
    assert!(faults[2].starts_with(reports), "{faults:?}");
    assert_eq!(alerts[0].kind, AlertKind::StoreFailed);
    assert_eq!(alerts[1].kind, AlertKind::Quarantine);
}

#[test]
fn the_list_is_bounded_and_the_worst_stay() {
    let mut ill = healthy();
    ill.nodes = (0..1000).map(|_| node("suspect")).collect();
    judge(&mut ill, &Recent::default());
    assert_eq!((ill.alerts.len(), ill.alerts_left_off), (MOST, 1001 - MOST));
    assert_eq!(ill.alerts[0].kind, AlertKind::NoLiveNode);
}

/// Otherwise the page, Prometheus and the documents would judge a standby differently.
#[test]
fn the_page_the_rules_and_the_documents_name_one_lag() {
    let files = [
        (
            include_str!("../../../../charts/kvpool/rules/kvpool.yaml"),
            format!("kvpool_master_log_last - kvpool_master_log_applied > {MUCH_LAG} and"),
        ),
        (
            include_str!("../../../../docs/operations/alerts.md"),
            format!("more than {MUCH_LAG} groups of the metadata log behind"),
        ),
        (
            include_str!("../../../../docs/operations/page.md"),
            format!("lacks more than {MUCH_LAG} groups"),
        ),
    ];
    for (text, lag) in files {
        assert!(text.contains(&lag), "{lag}");
    }
}
