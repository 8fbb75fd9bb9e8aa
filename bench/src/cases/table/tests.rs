use super::*;
use std::collections::HashSet;

#[test]
fn names_are_unique_and_cases_that_bound_others_exist() {
    let table = table();
    let ids: HashSet<&str> = table.iter().map(|case| case.id.as_str()).collect();
    assert_eq!(ids.len(), table.len());
    for case in &table {
        if let Bound::Case(id) = &case.bound {
            let other = table.iter().find(|other| other.id == *id).unwrap();
            assert!(
                !matches!(other.what, What::Machine(_)),
                "{}: machines have bounds of their own kind",
                case.id
            );
        }
    }
}

#[test]
fn each_case_has_a_limit_and_a_goal_or_says_why_not() {
    for case in table() {
        if let Bound::None(why) = &case.bound {
            assert!(why.len() > 10, "{}", case.id);
            assert!(
                !matches!(case.goal, Goal::RatioAtLeast(_) | Goal::RatioAtMost(_)),
                "{}: a ratio to nothing",
                case.id
            );
        }
        if let Goal::None(why) = case.goal {
            assert!(why.len() > 10, "{}", case.id);
        }
        // A higher rate is better, and a shorter time.
        let more = matches!(case.goal, Goal::RatioAtLeast(_) | Goal::AtLeast(_));
        let less = matches!(case.goal, Goal::RatioAtMost(_) | Goal::AtMost(_));
        match case.metric {
            Metric::Rate | Metric::Keys => assert!(!less, "{}", case.id),
            Metric::P50
            | Metric::Cpu
            | Metric::Bytes
            | Metric::Tail
            | Metric::Seconds
            | Metric::Times => assert!(!more, "{}", case.id),
        }
    }
}

#[test]
fn the_table_has_every_required_goal() {
    let table = table();
    let goal = |id: &str| {
        let case = table.iter().find(|case| case.id == id);
        case.unwrap_or_else(|| panic!("no case is called {id}"))
            .goal
    };
    for shape in ["32x1MiB", "128x256KiB", "16x8MiB"] {
        for (way, least) in [("shm", 0.9), ("tcp", 0.95)] {
            for verb in ["put", "get"] {
                let id = format!("{way}/{verb}/{shape}");
                assert_eq!(goal(&id), Goal::RatioAtLeast(least), "{id}");
            }
        }
    }
    for verb in ["shm/put", "shm/get", "tcp/put", "tcp/get"] {
        assert_eq!(
            goal(&format!("{verb}/32x64x16KiB")),
            Goal::RatioAtLeast(0.8)
        );
    }
    for verb in ["rdma/put", "rdma/get"] {
        for shape in ["32x1MiB", "128x256KiB", "16x8MiB", "32x64x16KiB"] {
            assert!(matches!(goal(&format!("{verb}/{shape}")), Goal::None(_)));
        }
    }
    for (id, expected) in [
        ("tcp/readers-2/32x1MiB", Goal::RatioAtLeast(0.8)),
        ("tcp/readers-4/32x1MiB", Goal::RatioAtLeast(0.8)),
        ("tcp/get-cpu/32x1MiB", Goal::AtMost(0.6)),
        ("shm/get/4KiB", Goal::RatioAtMost(1.5)),
        ("shm/get-known/4KiB", Goal::AtMost(5.0)),
        ("tcp/get/4KiB", Goal::RatioAtMost(2.5)),
        ("shm/put/4KiB", Goal::RatioAtMost(3.0)),
        ("tcp/put/4KiB", Goal::RatioAtMost(4.0)),
        ("shm/view-known/16MiB", Goal::AtMost(5.0)),
        ("exist/1", Goal::RatioAtMost(1.15)),
        ("exist/64", Goal::RatioAtMost(1.25)),
        ("exist-spinning/1", Goal::RatioAtMost(1.5)),
        ("exist-spinning/64", Goal::RatioAtMost(2.0)),
        ("exist/1024", Goal::AtLeast(6.0)),
        ("exist/8192", Goal::AtLeast(15.0)),
        ("exist/8192/1000000", Goal::RatioAtLeast(0.65)),
        ("match_prefix/1024", Goal::RatioAtMost(1.3)),
        ("shm/put/1024x64B", Goal::AtLeast(0.5)),
        ("shm/put-fresh/16x1MiB", Goal::RatioAtLeast(0.9)),
        ("full/put/32x1MiB", Goal::RatioAtLeast(0.9)),
        ("full/put/128x256KiB", Goal::RatioAtLeast(0.9)),
        ("full/put-beside-gets/32x1MiB", Goal::RatioAtLeast(0.9)),
        ("full/put-beside-gets/128x256KiB", Goal::RatioAtLeast(0.9)),
        ("full/put-tail/4KiB", Goal::AtMost(3.0)),
        ("full/put-tail/1MiB", Goal::AtMost(3.0)),
        ("full/crowd-wait", Goal::AtMost(1.0)),
        ("full/crowd-evicted", Goal::AtMost(1.0)),
        ("full/restart", Goal::AtMost(1.0)),
        ("full/node-loss", Goal::AtMost(1.5)),
        ("memory/master/100000", Goal::AtMost(160.0)),
    ] {
        assert_eq!(goal(id), expected, "{id}");
    }
}

#[test]
fn tcp_cases_use_veth_and_loopback_cases_have_no_goal() {
    for case in table() {
        let place = case.place;
        match (place.way, place.path) {
            (Way::Tcp, Path::Veth) => assert!(case.id.contains("tcp"), "{}", case.id),
            (Way::Tcp, Path::Loopback) => {
                assert!(case.id.starts_with("tcp-loopback/"), "{}", case.id);
                assert!(matches!(case.goal, Goal::None(_)), "{}", case.id);
            }
            (_, path) => assert_eq!(path, Path::Loopback, "{}", case.id),
        }
    }
}
