//! The alert rules, their runbooks and the dashboard name only existing metrics and commands.

use kvpool_tests::blocks::{check_all, put_all};
use kvpool_tests::daemon::path_of;
use kvpool_tests::promql::{Scrape, Used};
use kvpool_tests::{Cluster, Options};
use regex::Regex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/kvpool");
const RUNBOOKS: &str = include_str!("../../../docs/operations/alerts.md");
const DASHBOARD: &str = include_str!("../../../charts/kvpool/dashboards/kvpool.json");
/// The parts of each runbook, in this order.
const PARTS: [&str; 4] = [
    "**Meaning.**",
    "**Users notice.**",
    "**Confirm.**",
    "**Do.**",
];

fn rule_file() -> PathBuf {
    Path::new(CHART).join("rules/kvpool.yaml")
}

fn yaml(path: &Path) -> Value {
    serde_norway::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The rules by the names of their alerts.
fn alerts() -> BTreeMap<String, Value> {
    let file = yaml(&rule_file());
    let rules = list(&file["groups"])
        .iter()
        .flat_map(|group| list(&group["rules"]));
    let named: BTreeMap<String, Value> = rules
        .clone()
        .map(|rule| (text(&rule["alert"]).to_owned(), rule.clone()))
        .collect();
    assert_eq!(named.len(), rules.count(), "each alert has its own name");
    assert!(!named.is_empty());
    named
}

/// The sections of the runbooks by their headings.
fn runbooks() -> BTreeMap<String, &'static str> {
    let sections = RUNBOOKS.split("\n### ").skip(1);
    sections
        .map(|section| section.split_once('\n').unwrap())
        // The last section of a chapter ends where the next chapter begins.
        .map(|(name, body)| (name.to_owned(), body.split("\n## ").next().unwrap()))
        .collect()
}

/// Every panel that is not a row.
fn panels(dashboard: &Value) -> Vec<&Value> {
    let panels = list(&dashboard["panels"]).iter();
    panels.filter(|panel| panel["type"] != "row").collect()
}

/// Every query of the dashboard: in panels, annotations and variables.
fn queries() -> BTreeSet<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let targets = panels(&dashboard)
        .into_iter()
        .flat_map(|panel| list(&panel["targets"]));
    let mut queries: BTreeSet<String> = targets
        .chain(list(&dashboard["annotations"]["list"]))
        .map(|target| text(&target["expr"]).to_owned())
        .collect();
    assert!(!queries.remove(""), "each target has an expression");
    queries
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_and_label_of_rules_and_dashboard_is_in_a_scrape() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = disk.path().join("ssd");
    let cluster = Cluster::start(Options {
        node: vec!["--ssd".into(), format!("path={},size=1GiB", file.display())],
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    assert_eq!(check_all(&client, 0..8, 1 << 20).await.right, 8);
    let has_medium = || {
        let page = cluster.master.http_get("/metrics")?;
        Ok(page.contains("kvpool_master_media{state=\"ready\"} 1\n"))
    };
    cluster
        .wait_for("a medium that is ready", has_medium)
        .unwrap();

    let mut scrape = Scrape::default();
    for daemon in [&cluster.master, &cluster.nodes[0]] {
        scrape.add(&daemon.http_get("/metrics").unwrap()).unwrap();
    }
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let alerts = alerts();
    let rules = alerts.values().map(|rule| text(&rule["expr"]).to_owned());
    let variables = list(&dashboard["templating"]["list"]).iter();
    let variables = variables.map(|variable| text(&variable["definition"]).to_owned());
    let mut lacking = BTreeSet::new();
    // A variable that selects by __name__ names metrics in a pattern.
    let names = Regex::new("kvpool_[a-z_]+").unwrap();
    for query in variables {
        lacking.extend(
            names
                .find_iter(&query)
                .flat_map(|name| scrape.lacks(name.as_str()).unwrap()),
        );
    }
    for expression in rules.chain(queries()) {
        lacking.extend(scrape.lacks(&expression).unwrap());
    }
    assert_eq!(lacking, BTreeSet::new());
}

/// The metrics of the most important alerts count the events of a real pool.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_node_and_refused_puts_are_counted() {
    let cluster = Cluster::start(Options::default().master(&["--drop-after", "5s"])).unwrap();
    let counts = |state: &str| {
        let page = cluster.master.http_get("/metrics")?;
        Ok(page.contains(&format!("kvpool_master_nodes{{state=\"{state}\"}} 1\n")))
    };
    cluster
        .wait_for("one live node", || counts("live"))
        .unwrap();
    cluster.nodes[0].pause().unwrap();
    cluster
        .wait_for("one suspect node", || counts("suspect"))
        .unwrap();
    let dropped = || Ok(cluster.master.metric("kvpool_master_nodes_dropped_total")? == 1.0);
    cluster.wait_for("the node's drop", dropped).unwrap();
    assert!(!counts("suspect").unwrap() && !counts("live").unwrap());
    assert_eq!(
        cluster
            .master
            .metric("kvpool_master_capacity_bytes")
            .unwrap(),
        0.0
    );

    let options = kvpool_client::Options {
        timeouts: kvpool_client::Timeouts {
            put: std::time::Duration::from_secs(2),
            ..Default::default()
        },
        ..cluster.client_options()
    };
    let client = kvpool_client::Client::connect(options).await.unwrap();
    assert!(put_all(&client, 0..3, 4096).await.is_err());
    let refused = "kvpool_master_puts_refused_total{code=\"no_nodes\"}";
    assert!(cluster.master.metric(refused).unwrap() >= 3.0);
    // A block whose client gave up counts once, whatever the number of attempts.
    let failed = "kvpool_master_puts_failed_total{code=\"no_nodes\"}";
    let all_failed = || Ok(cluster.master.metric(failed)? == 3.0);
    cluster.wait_for("the failed puts", all_failed).unwrap();
}

#[test]
fn every_alert_is_whole_and_has_its_runbook() {
    let runbooks = runbooks();
    let alerts = alerts();
    let names = |of: Vec<&String>| of.into_iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(
        names(alerts.keys().collect()),
        names(runbooks.keys().collect())
    );
    for (name, rule) in &alerts {
        assert!(name.starts_with("Kvpool"), "{name}");
        assert!(!text(&rule["for"]).is_empty(), "{name} has no `for`");
        let severity = text(&rule["labels"]["severity"]);
        assert!(["page", "ticket"].contains(&severity), "{name}: {severity}");
        let notes = &rule["annotations"];
        for note in ["summary", "description"] {
            assert!(
                text(&notes[note]).contains("{{ $labels."),
                "{name}: {note} names no object"
            );
        }
        let anchor = format!("docs/operations/alerts.md#{}", name.to_lowercase());
        assert_eq!(text(&notes["runbook_url"]), anchor);
        let runbook = runbooks[name];
        let places: Vec<_> = PARTS.iter().map(|part| runbook.find(part)).collect();
        assert!(
            places.iter().all(Option::is_some) && places.is_sorted(),
            "{name}: {places:?}"
        );
        assert!(
            runbook.contains(&format!("`{severity}`")),
            "{name} is of severity {severity}"
        );
        let row = format!("[{name}](#{})", name.to_lowercase());
        assert!(RUNBOOKS.contains(&row), "no row for {name} in the table");
    }
}

/// An operator types these commands of a runbook during an incident.
#[test]
fn every_command_and_metric_of_the_runbooks_exists() {
    let in_quotes = Regex::new("`(kvctl [^`]+)`").unwrap();
    let mut commands = BTreeSet::new();
    for command in in_quotes.captures_iter(RUNBOOKS) {
        let words: Vec<&str> = command[1].split_whitespace().skip(1).collect();
        let is_name = |word: &&&str| word.bytes().all(|byte| byte.is_ascii_lowercase());
        let names: Vec<&str> = words.iter().take_while(is_name).copied().collect();
        let help = Command::new(path_of("kvctl").unwrap())
            .args(&names)
            .arg("--help")
            .output()
            .unwrap();
        assert!(
            help.status.success() && !names.is_empty(),
            "{}",
            &command[1]
        );
        let help = String::from_utf8(help.stdout).unwrap();
        for flag in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(flag), "{}: no {flag}", &command[1]);
        }
        commands.insert(command[1].to_owned());
    }
    assert!(commands.len() >= 5, "{commands:?}");
    let table = include_str!("../../../docs/operations/metrics.md");
    let metric = Regex::new("`kvpool_(?:master|node)_([a-z_]+)").unwrap();
    for name in metric.captures_iter(RUNBOOKS) {
        assert!(table.contains(&format!("`{}`", &name[1])), "{}", &name[0]);
    }
}

#[test]
fn every_alert_has_a_test_that_fires_and_one_that_does_not() {
    let (mut fires, mut is_quiet) = (BTreeSet::new(), BTreeSet::new());
    let alerts = alerts();
    for file in test_files() {
        for test in list(&yaml(&file)["tests"]) {
            let series: Vec<&str> = list(&test["input_series"])
                .iter()
                .map(|series| text(&series["series"]))
                .collect();
            for case in list(&test["alert_rule_test"]) {
                let name = text(&case["alertname"]);
                let used = Used::read(text(&alerts[name]["expr"])).unwrap();
                // Without series of the rule, a test would be quiet whatever the rule is.
                let has = |metric: &str| series.iter().any(|one| one.starts_with(metric));
                assert!(
                    used.selectors.iter().any(|s| has(&s.name)),
                    "{}",
                    test["name"]
                );
                match list(&case["exp_alerts"]).is_empty() {
                    true => is_quiet.insert(name.to_owned()),
                    false => fires.insert(name.to_owned()),
                };
            }
        }
    }
    let all: BTreeSet<String> = alerts.into_keys().collect();
    assert_eq!(fires, all);
    assert_eq!(is_quiet, all);
}

#[test]
fn every_panel_has_a_unit_a_data_source_and_a_place_of_its_own() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut ids = BTreeSet::new();
    let mut taken = BTreeSet::new();
    for panel in list(&dashboard["panels"]) {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        let place = |side: &str| panel["gridPos"][side].as_u64().unwrap();
        assert!(place("x") + place("w") <= 24, "{panel}");
        for x in place("x")..place("x") + place("w") {
            for y in place("y")..place("y") + place("h") {
                assert!(taken.insert((x, y)), "{} overlaps", panel["title"]);
            }
        }
    }
    for panel in panels(&dashboard) {
        let title = text(&panel["title"]);
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        assert!(!text(&panel["description"]).is_empty(), "{title}");
        assert!(
            !text(&panel["fieldConfig"]["defaults"]["unit"]).is_empty(),
            "{title}"
        );
        for target in list(&panel["targets"]) {
            let expression = text(&target["expr"]);
            for selector in Used::read(expression).unwrap().selectors {
                let by =
                    |(label, value): &(String, String)| label == "instance" && value == "$instance";
                // A join on the leader takes its series from the other side.
                let is_joined = selector.name == "kvpool_master_leads";
                assert!(
                    is_joined || selector.matchers.iter().any(by),
                    "{title}: {expression}"
                );
            }
        }
    }
    let variables = list(&dashboard["templating"]["list"]).iter();
    let variables: Vec<&str> = variables.map(|variable| text(&variable["name"])).collect();
    assert_eq!(variables, ["datasource", "namespace", "job", "instance"]);
}

fn test_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(CHART).join("rules/tests")).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The path of promtool. Without promtool, prints that `test` is skipped.
fn promtool_or_skip(test: &str) -> Option<OsString> {
    let named = std::env::var_os("KVPOOL_PROMTOOL");
    let is_named = named.is_some();
    let program = named.unwrap_or_else(|| "promtool".into());
    let answers = Command::new(&program).arg("--version").output();
    if answers.is_ok_and(|output| output.status.success()) {
        return Some(program);
    }
    assert!(!is_named, "KVPOOL_PROMTOOL names {}", program.display());
    eprintln!("SKIPPED {test}: promtool is not here (Debian package prometheus)");
    None
}

/// Runs `promtool` with these files, which must succeed.
fn runs(promtool: &OsString, what: &str, files: &[PathBuf]) {
    let mut command = Command::new(promtool);
    let output = command.args([what, "rules"]).args(files).output().unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() {
    let test = "promtool_accepts_the_rules_and_their_tests_pass";
    let Some(promtool) = promtool_or_skip(test) else {
        return;
    };
    runs(&promtool, "check", &[rule_file()]);
    runs(&promtool, "test", &test_files());
}

/// promtool reads rules only, so each query becomes one.
#[test]
fn promtool_accepts_every_query_of_the_dashboard() {
    let test = "promtool_accepts_every_query_of_the_dashboard";
    let Some(promtool) = promtool_or_skip(test) else {
        return;
    };
    let queries = queries();
    let as_rule = |(number, query): (usize, &String)| {
        let query = query.replace("$__rate_interval", "5m");
        serde_json::json!({"record": format!("query_{number}"), "expr": query})
    };
    let rules: Vec<Value> = queries.iter().enumerate().map(as_rule).collect();
    let group = serde_json::json!({"groups": [{"name": "queries", "rules": rules}]});
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("queries.yaml");
    // JSON is YAML.
    std::fs::write(&path, group.to_string()).unwrap();
    runs(&promtool, "check", &[path]);
}
