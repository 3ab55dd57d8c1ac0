package main

import (
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"

	ort "github.com/yalue/onnxruntime_go"
)

// SNIPPET
func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	ort.SetSharedLibraryPath(os.Getenv("ONNXRUNTIME_LIB"))
	check(ort.InitializeEnvironment())
	in, out, err := ort.GetInputOutputInfo(os.Args[1])
	check(err)
	var inputNames, outputNames []string
	for _, one := range in {
		inputNames = append(inputNames, one.Name)
	}
	for _, one := range out {
		outputNames = append(outputNames, one.Name)
	}
	session, err := ort.NewDynamicAdvancedSession(os.Args[1], inputNames, outputNames, nil)
	check(err)
	trace, err := os.Create(os.Args[2])
	check(err)
	var outputs []ort.Value
	for step := int64(0); step < 4; step++ {
		inputs := make([]ort.Value, len(inputNames))
		for i, name := range inputNames {
			switch {
			case strings.HasPrefix(name, "past") && step == 0:
				inputs[i], err = ort.NewEmptyTensor[float32](ort.NewShape(1, 2, 0, 8))
			case strings.HasPrefix(name, "past"):
				inputs[i] = outputs[slices.Index(outputNames, strings.Replace(name, "past_key_values", "present", 1))]
			case name == "attention_mask":
				ones := make([]int64, step+1)
				for k := range ones {
					ones[k] = 1
				}
				inputs[i], err = ort.NewTensor(ort.NewShape(1, step+1), ones)
			case name == "position_ids":
				inputs[i], err = ort.NewTensor(ort.NewShape(1, 1), []int64{step})
			default:
				inputs[i], err = ort.NewTensor(ort.NewShape(1, 1), []int64{5 + step})
			}
			check(err)
		}
		outputs = make([]ort.Value, len(outputNames))
		check(session.Run(inputs, outputs))
		check(note(trace, inputNames, inputs, outputNames, outputs))
	}
}
