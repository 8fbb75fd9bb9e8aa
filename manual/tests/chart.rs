//! The Helm chart fits the programs and its own documentation.
//!
//! `KVPOOL_GENERATE=1` writes the table of values in the chart's README anew. The tests that render the chart need
//! helm: in the path, or named in `KVPOOL_HELM`.

use clap::{ArgAction, CommandFactory, Parser};
use kvpool_daemon::{advertise, config};
use kvpool_master::{Config as MasterConfig, Flags as MasterFlags};
use kvpool_store_node::{Config as NodeConfig, Flags as NodeFlags};
use serde_json::Value;
/// Keeps the order of its members, unlike a value of serde_json.
use serde_norway::Value as Schema;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const BEGIN: &str =
    "<!-- Made from values.schema.json: KVPOOL_GENERATE=1 cargo test -p kvpool-manual -->\n";
const END: &str = "<!-- End of the table -->";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(file: &str) -> String {
    let path = repository().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// One line for each value, and one for each group of values.
fn rows(path: &str, schema: &Schema, table: &mut String) {
    let description = schema["description"]
        .as_str()
        .unwrap_or_else(|| panic!("{path}: no description"));
    let description = description.replace('|', "\\|");
    let members = schema.get("properties").and_then(Schema::as_mapping);
    match members {
        Some(members) => {
            if !path.is_empty() {
                writeln!(table, "| **`{path}`** | | {description} |").unwrap();
            }
            for (name, member) in members {
                let name = name.as_str().expect("a member has a name");
                let path = if path.is_empty() {
                    name.to_owned()
                } else {
                    format!("{path}.{name}")
                };
                rows(&path, member, table);
            }
        }
        None => {
            let default = serde_json::to_string(&schema["default"]).unwrap();
            let choice = schema
                .get("enum")
                .and_then(Schema::as_sequence)
                .map(|choice| {
                    let choice: Vec<_> = choice
                        .iter()
                        .map(|one| format!("`{}`", one.as_str().unwrap()))
                        .collect();
                    format!(". One of {}", choice.join(", "))
                });
            let choice = choice.unwrap_or_default();
            writeln!(table, "| `{path}` | `{default}` | {description}{choice} |").unwrap();
        }
    }
}

fn table() -> String {
    let schema = serde_norway::from_str(&read("charts/kvpool/values.schema.json")).unwrap();
    let mut table = String::from("| value | default | meaning |\n|---|---|---|\n");
    rows("", &schema, &mut table);
    table
}

/// The table is between two marks; everything else is written by hand.
#[test]
fn the_table_of_values_in_the_readme_is_that_of_the_schema() {
    let file = "charts/kvpool/README.md";
    let text = read(file);
    let (before, rest) = text
        .split_once(BEGIN)
        .expect("the README has the first mark");
    let (current, after) = rest.split_once(END).expect("the README has the last mark");
    let table = table();
    if std::env::var_os("KVPOOL_GENERATE").is_some() {
        std::fs::write(
            repository().join(file),
            format!("{before}{BEGIN}{table}{END}{after}"),
        )
        .unwrap();
        return;
    }
    assert!(table.lines().count() > 90, "{table}");
    assert_eq!(
        current, table,
        "{file} is old: run KVPOOL_GENERATE=1 cargo test -p kvpool-manual --test chart"
    );
}

/// The objects that the chart makes of a file of values; `None` without helm.
fn rendered(values: &Path) -> Option<Vec<Value>> {
    let helm = std::env::var_os("KVPOOL_HELM").unwrap_or_else(|| "helm".into());
    let chart = repository().join("charts/kvpool");
    let run = Command::new(helm)
        .args(["template", "kvpool", "--namespace", "kvpool", "--values"])
        .args([values, &chart])
        .output()
        .ok()?;
    assert!(
        run.status.success(),
        "{}: {}",
        values.display(),
        String::from_utf8_lossy(&run.stderr)
    );
    let text = String::from_utf8(run.stdout).unwrap();
    let objects = text
        .split("\n---\n")
        .map(|text| serde_norway::from_str(text).unwrap());
    Some(
        objects
            .filter(|object: &Value| object.is_object())
            .collect(),
    )
}

/// The command line of a daemon's container, with the variables that the kubelet fills in.
fn command_line(container: &Value) -> Vec<String> {
    let words = [&container["command"], &container["args"]];
    let words = words.iter().flat_map(|words| words.as_array().unwrap());
    let words: Vec<&str> = words.map(|word| word.as_str().unwrap()).collect();
    let is_ipv6 = words.iter().any(|word| word.starts_with("--listen=[::]:"));
    let pod_ip = if is_ipv6 { "fd00::1" } else { "10.0.0.1" };
    let filled = words.into_iter().map(|word| {
        let word = word
            .replace("$(POD_NAME)", "kvpool-0")
            .replace("$(POD_IP)", pod_ip);
        let word = word.replace("$(HOST_NAME)", "host-1.example.org");
        assert!(!word.contains("$("), "{word}");
        word
    });
    filled.collect()
}

/// The chart refuses any other flag that stands twice, as the programs do.
#[test]
fn the_chart_knows_which_flags_make_a_list() {
    let text = read("charts/kvpool/templates/_args.tpl");
    let (_, rest) = text.split_once("$lists := list ").unwrap();
    let (known, _) = rest.split_once(" -}}").unwrap();
    let known: BTreeSet<String> = known
        .split(' ')
        .map(|flag| flag.trim_matches('"').to_owned())
        .collect();
    let programs = [MasterFlags::command(), NodeFlags::command()];
    let lists: BTreeSet<String> = programs
        .iter()
        .flat_map(|program| program.get_arguments())
        .filter(|flag| matches!(flag.get_action(), ArgAction::Append))
        .filter_map(|flag| Some(format!("--{}", flag.get_long()?)))
        .collect();
    assert_eq!(known, lists);
}

/// Loads the configuration that each set of values gives the daemons. A flag that a program lacks, and a setting that
/// it refuses, would show in a cluster only.
#[test]
fn the_programs_take_the_flags_that_the_chart_gives_them() {
    let folder = repository().join("tests/charts/values");
    let mut sets: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    sets.sort();
    assert!(sets.len() >= 10, "{sets:?}");
    let (mut masters, mut nodes, mut ipv6_nodes) = (0, 0, 0);
    for values in sets {
        let Some(objects) = rendered(&values) else {
            eprintln!(
                "SKIPPED the_programs_take_the_flags_that_the_chart_gives_them: no helm; KVPOOL_HELM can name one"
            );
            return;
        };
        let shown = values.display();
        for object in objects {
            let pod = &object["spec"]["template"]["spec"];
            let container = &pod["containers"][0];
            match container["name"].as_str() {
                Some("kvmaster") => {
                    let flags = MasterFlags::try_parse_from(command_line(container));
                    let flags = flags.unwrap_or_else(|error| panic!("{shown}: {error}"));
                    let config: MasterConfig = config::load(None, "NOBODYS_", &flags).unwrap();
                    config
                        .validate()
                        .unwrap_or_else(|error| panic!("{shown}: {error}"));
                    masters += 1;
                }
                Some("kvstore-node") => {
                    let flags = NodeFlags::try_parse_from(command_line(container));
                    let flags = flags.unwrap_or_else(|error| panic!("{shown}: {error}"));
                    let config: NodeConfig = config::load(None, "NOBODYS_", &flags).unwrap();
                    config
                        .validate()
                        .unwrap_or_else(|error| panic!("{shown}: {error}"));
                    // Peers get the pod's address, an IPv6 address in brackets.
                    let listen: SocketAddr = config.listen.parse().unwrap();
                    let told = advertise::decide(Some(config.advertise.as_str()), listen).unwrap();
                    let told: SocketAddr = told.address.parse().unwrap();
                    assert_eq!(
                        (told.is_ipv6(), told.port()),
                        (listen.is_ipv6(), listen.port()),
                        "{shown}: {told}"
                    );
                    ipv6_nodes += usize::from(told.is_ipv6());
                    let patience = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
                    let ssd = if config.ssd.is_empty() {
                        Duration::ZERO
                    } else {
                        config.ssd_drain_timeout
                    };
                    let drain = config.drain_timeout + ssd.max(config.move_drain_timeout);
                    assert!(
                        Duration::from_secs(patience) >= drain + Duration::from_secs(30),
                        "{shown}: {patience} s for a drain of {drain:?}"
                    );
                    let memory: u64 = config.segment.iter().map(|size| size.as_u64()).sum();
                    let limit = &container["resources"]["limits"];
                    let limit = if config.hugepages {
                        &limit["hugepages-2Mi"]
                    } else {
                        &limit["memory"]
                    };
                    let limit: u64 = limit
                        .as_str()
                        .unwrap()
                        .strip_suffix("Mi")
                        .unwrap()
                        .parse()
                        .unwrap();
                    assert!(
                        limit << 20 >= memory,
                        "{shown}: {limit} MiB for segments of {memory} bytes"
                    );
                    nodes += 1;
                }
                _ => {}
            }
        }
    }
    assert!(
        masters >= 10 && nodes >= 10 && ipv6_nodes > 0,
        "{masters} masters, {nodes} nodes, {ipv6_nodes} of them with IPv6"
    );
}
